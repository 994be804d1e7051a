"""What a sandbox's allow-list lets in, and what a request to its proxy is read as."""

import ipaddress
from ipaddress import IPv4Address, IPv6Address

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.sandbox.allowlist import PORT, HostError, is_public, parse, plain, target, variables
from opengyre.sandbox.proxy_requests import RefusedError, answer, asked, refusal

LABELS = st.from_regex(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
NAMES = st.lists(LABELS, min_size=1, max_size=4).map(".".join)
V4 = st.ip_addresses(v=4)
V6 = st.ip_addresses(v=6)
SPELLINGS = [str, str.upper, lambda name: f"{name}.", str.title]


@given(NAMES, st.sampled_from(SPELLINGS), st.sampled_from(SPELLINGS))
def test_a_listed_name_is_reached_in_every_spelling(name, listed, asked_for):
    assert parse([listed(name)]).lists(target(asked_for(name)))


@given(NAMES, NAMES)
def test_a_name_is_reached_only_where_it_is_listed(name, other):
    assert parse([name]).lists(target(other)) == (name == other)


@given(NAMES, NAMES)
def test_a_wildcard_reaches_all_below_a_name_and_nothing_beside_it(name, front):
    rules = parse([f"*.{name}"])
    assert rules.lists(target(f"{front}.{name}"))
    assert not rules.lists(target(name))
    assert not rules.lists(target(f"{front}{name}")) or f"{front}{name}".endswith(f".{name}")
    assert not rules.lists(target(f"{name}.{front}x"))


@given(st.one_of(V4, V6))
def test_networks_and_addresses_let_in_addresses_and_no_name(address):
    rules = parse([str(address), "0.0.0.0/0", "::/0"])
    assert rules.lists(target(str(address)))
    assert not rules.lists(target("example.org"))
    assert rules.objection(plain(address), own=True) is None, "it is listed itself"


@given(st.one_of(V4, V6))
def test_an_address_that_is_not_public_is_reached_only_where_it_is_listed_itself(address):
    wide = parse(["0.0.0.0/0", "::/0", "example.org"])
    short = plain(address)
    assert (wide.objection(short) is None) == is_public(short)
    assert wide.objection(short, own=True) is not None
    if not short.is_global or short.is_multicast:
        assert not is_public(short), "nothing is public here that Python's table says is not"


@given(V4)
def test_an_ipv4_address_inside_an_ipv6_one_is_that_address(address):
    mapped = f"::ffff:{address}"
    assert target(mapped) == target(f"[{mapped}]") == target(str(address))
    assert parse([mapped]) == parse([str(address)])
    assert not parse([str(IPv4Address(int(address) ^ 1))]).lists(target(mapped))


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "0.0.0.0", "10.1.2.3", "100.64.0.1", "169.254.169.254", "192.168.1.1", "172.16.0.1", "224.0.0.1",
        "255.255.255.255", "::1", "::", "fe80::1", "fd00::1", "64:ff9b::7f00:1", "2002:7f00:1::1", "2001::1", "ff02::1",
    ],
)  # fmt: skip
def test_what_is_not_public(address):
    found = ipaddress.ip_address(address)
    assert not is_public(found)
    near = "10.0.0.0/8" if found.version == 4 else "fd00::/8"
    lets = parse([near]).objection(found)
    assert (lets is None) == (found in ipaddress.ip_network(near))


def test_public_addresses_are_public():
    for text in ("1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "2a00:1450::1"):
        assert is_public(ipaddress.ip_address(text)), text
    assert parse(["example.org"]).objection(IPv6Address("2a00:1450::1")) is None
    assert "address of the machine itself" in str(parse(["example.org"]).objection(IPv4Address("1.1.1.1"), own=True))


@pytest.mark.parametrize(
    "host",
    [
        "2130706433", "0177.0.0.1", "0x7f.0.0.1", "0x7f000001", "127.1", "127.0.0.01", "1.2.3.4.5", "a.0x", "a.1",
        "", ".", "..", "a..b", "-a", "a-", "a_b", "a b", "a\n", "a\0", "a%2e", "é.org", "x" * 64, "[a]", "[127.0.0.1]",
        "fe80::1%lo", "a:80", "a/b", "user@a", "*.a", "[::1", "::1]", "a\\b", "127。0。0。1",
    ],
)  # fmt: skip
def test_escape_what_is_not_plainly_a_host_is_refused(host):
    with pytest.raises(HostError, match="host is "):
        target(host)


@pytest.mark.parametrize(
    "entry",
    [
        "", "*", "*.", "a.*", "*a.org", "*.*.org", "*.10.0.0.1", "*.1", "http://a.org", "a.org:443", "a.org/x",
        "10.0.0.1/8", "10.0.0.0/33", "[::1]", "fe80::1%lo/128", "::1%lo", "2130706433", "a b", "bücher.org",
    ],
)  # fmt: skip
def test_an_entry_that_is_no_host_is_named(entry):
    with pytest.raises(HostError, match=r"allowed_hosts has .*; allowed are a host name, \*\.name, an address"):
        parse(["ok.org", entry])


def test_a_list_has_one_spelling_and_a_bound():
    assert parse(["A.org.", "a.ORG", "*.B.org", "10.0.0.0/8", "::FFFF:10.0.0.0/104", "::1"]).words == (
        "a.org", "*.b.org", "10.0.0.0/8", "::1"
    )  # fmt: skip
    with pytest.raises(HostError, match="257 entries; allowed are 256"):
        parse([f"h{number}.org" for number in range(257)])
    assert parse([]).lists(target("a.org")) is False


def test_commands_are_told_of_the_proxy_where_there_is_one():
    assert variables("none") == {}
    found = variables("allowlist")
    assert found["https_proxy"] == found["HTTP_PROXY"] == f"http://127.0.0.1:{PORT}"
    assert "127.0.0.1" in found["NO_PROXY"]


def request(text: str) -> h11.Request:
    near = h11.Connection(h11.SERVER)
    near.receive_data(text.replace("\n", "\r\n").encode("latin-1") + b"\r\n\r\n")
    event = near.next_event()
    assert isinstance(event, h11.Request)
    return event


@pytest.mark.parametrize(
    ("text", "authority"),
    [
        ("CONNECT a.org:443 HTTP/1.1\nHost: a.org:443", "a.org:443"),
        ("CONNECT A.ORG.:443 HTTP/1.1\nHost: a.org", "a.org:443"),
        ("CONNECT [::1]:443 HTTP/1.0", "[::1]:443"),
        ("CONNECT xn--bcher-kva.example:1 HTTP/1.0", "xn--bcher-kva.example:1"),
        ("GET http://a.org/x?y HTTP/1.1\nHost: a.org", "a.org:80"),
        ("GET HTTP://a.org:8080 HTTP/1.1\nHost: A.org:8080", "a.org:8080"),
        ("GET http://a.org?q HTTP/1.1\nHost:", "a.org:80"),
    ],
)
def test_requests_that_are_plain(text, authority):
    assert asked(request(text)).authority == authority


@pytest.mark.parametrize(
    "text",
    [
        "CONNECT a.org HTTP/1.0", "CONNECT a.org:443:80 HTTP/1.0", "CONNECT a.org:443@evil.org:443 HTTP/1.0",
        "CONNECT user@a.org:443 HTTP/1.0", "CONNECT a.org:0 HTTP/1.0", "CONNECT a.org:65536 HTTP/1.0",
        "CONNECT a.org:+80 HTTP/1.0", "CONNECT :443 HTTP/1.0", "CONNECT 2130706433:80 HTTP/1.0",
        "CONNECT a.org#.evil.org:443 HTTP/1.0", "CONNECT a.org%00.evil.org:443 HTTP/1.0", "CONNECT ::1:443 HTTP/1.0",
        "CONNECT http://a.org:443 HTTP/1.0", "CONNECT a.org:443 HTTP/1.1\nHost: evil.org:443",
        "CONNECT a.org:443 HTTP/1.1\nHost: a.org\nContent-Length: 3", "GET / HTTP/1.1\nHost: a.org",
        "OPTIONS * HTTP/1.1\nHost: a.org", "GET https://a.org/ HTTP/1.1\nHost: a.org", "GET ftp://a.org/ HTTP/1.0",
        "GET http://a.org/ HTTP/1.1\nHost: evil.org", "GET http://a.org/ HTTP/1.1\nHost: a.org:81",
        "GET http://a.org/ HTTP/1.1\nHost: a.org, evil.org", "GET http://user@a.org/ HTTP/1.0",
        "GET http://a.org\\@evil.org/ HTTP/1.0", "GET http://a.org:80#@evil.org/ HTTP/1.0", "GET http:///x HTTP/1.0",
        "GET http:a.org/ HTTP/1.0", "GET //a.org/ HTTP/1.0", "GET http://0x7f.1/ HTTP/1.0",
        "POST http://a.org/ HTTP/1.1\nHost: a.org\nContent-Length: 3\nTransfer-Encoding: chunked",
        "POST http://a.org/ HTTP/1.0\nTransfer-Encoding: chunked",
    ],
)  # fmt: skip
def test_escape_what_can_be_read_in_two_ways_is_refused(text):
    with pytest.raises(RefusedError) as refused:
        asked(request(text))
    assert refused.value.status == 400
    assert "allowed" in refused.value.sentence


def test_the_request_that_goes_on_is_made_anew():
    onward = asked(
        request(
            "POST http://A.org./x/../y?z HTTP/1.1\nHost: a.org:80\nConnection: x-own, close\nX-Own: 1\nX-Other: 2\n"
            "Proxy-Authorization: Basic x\nUpgrade: h2c\nTE: trailers\nExpect: 100-continue\nTransfer-Encoding: chunked"
        )
    ).onward
    assert onward is not None
    assert (onward.method, onward.target, onward.http_version) == (b"POST", b"/x/../y?z", b"1.1")
    assert list(onward.headers) == [
        (b"host", b"a.org"), (b"x-other", b"2"), (b"transfer-encoding", b"chunked"), (b"connection", b"close")
    ]  # fmt: skip


def test_an_answer_keeps_what_is_the_hosts():
    got = h11.Response(
        status_code=302, reason=b"Found",
        headers=[(b"Location", b"http://evil.org/"), (b"Keep-Alive", b"timeout=5"), (b"Content-Length", b"0")],
    )  # fmt: skip
    assert list(answer(got).headers) == [
        (b"location", b"http://evil.org/"), (b"content-length", b"0"), (b"connection", b"close")
    ]  # fmt: skip
    response, body = refusal(403, "host 'é' is not allowed")
    assert body == b"host '?' is not allowed\n"
    assert (b"content-length", str(len(body)).encode()) in list(response.headers)
