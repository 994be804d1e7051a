"""What is shown of an address."""

from opengyre.shared.bus import Bus
from opengyre.shared.masked import masked


def test_passwords_of_several_servers_are_not_shown() -> None:
    url = "nats://host:secret@nats-0:4222, nats://token@nats-1:4222,nats://nats-2:4222"
    shown = "nats://**********@nats-0:4222, nats://**********@nats-1:4222,nats://nats-2:4222"
    assert masked(url) == shown
    assert Bus(url, "test").url == shown
    assert masked("mail a@b.example to //c") == "mail a@b.example to //c"
