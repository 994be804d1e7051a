"""What a stack consists of, and in which order it ends."""

from pathlib import Path

import pytest

from opengyre.cli.supervisor_plan import MARK, Addresses, Fleet, Program, services, stages
from opengyre.shared.settings import load

ADDRESSES = Addresses("nats://127.0.0.1:1", "redis://127.0.0.1:2", 8080, "secret", Path("/state"))


def test_the_gateway_stops_first_and_the_broker_last() -> None:
    below = (Program("nats", ("nats",)), Program("valkey", ("valkey",)))
    order = [[program.name for program in stage] for stage in stages([*below, *services(ADDRESSES, Fleet(2))])]
    assert order[0] == ["gateway"]
    assert {"rollout", "trainer", "trajectory", "allocator", "host0", "host1"} == set(order[1])
    assert order[2:] == [["sandbox"], ["valkey"], ["nats"]]


def test_every_service_is_told_where_everything_is() -> None:
    programs = services(ADDRESSES, Fleet(3))
    assert {program.name for program in programs} >= {"host0", "host1", "host2"}
    for program in programs:
        environment = program.environment
        assert environment["GYRE_BUS__URL"] == "nats://127.0.0.1:1"
        assert environment["GYRE_CACHE__URL"] == "redis://127.0.0.1:2"
        assert environment[MARK] == environment["GYRE_STATE_DIR"] == "/state"
        assert environment["GYRE_HTTP__PORT"] == ("8080" if program.name == "gateway" else "0")
        assert ("GYRE_GATEWAY__API_KEYS" in environment) == (program.name == "gateway")
        if program.name.startswith("host"):
            assert environment["GYRE_HOST__HOST"] == program.name


@pytest.mark.parametrize("key", ["secret", "a,b", "[a"])
def test_the_gateway_s_key_is_one_whatever_it_holds(key: str) -> None:
    addresses = Addresses("nats://127.0.0.1:1", None, 1, key, Path("/state"))
    (gateway,) = (one for one in services(addresses, Fleet(1)) if one.name == "gateway")
    said = {name: value for name, value in gateway.environment.items() if name.startswith("GYRE_GATEWAY")}
    assert [one.get_secret_value() for one in load(None, said).gateway.api_keys] == [key]


def test_without_a_cache_none_is_named() -> None:
    program = services(Addresses("nats://127.0.0.1:1", None, 1, None, Path("/state")), Fleet(1))[0]
    assert "GYRE_CACHE__URL" not in program.environment


def test_emulated_hosts_share_processes_and_others_do_not() -> None:
    def hosts(fleet: Fleet) -> dict[str, tuple[str, str]]:
        programs = [program for program in services(ADDRESSES, fleet) if program.name.startswith("host")]
        return {p.name: (p.environment["GYRE_HOST__ENGINE"], p.environment["GYRE_HOST__COUNT"]) for p in programs}

    assert hosts(Fleet(32, "emulated")) == {"host0": ("emulated", "32")}
    assert hosts(Fleet(5, "emulated", 2)) == {"host0": ("emulated", "3"), "host1": ("emulated", "2")}
    assert hosts(Fleet(2, "emulated", 8)) == {"host0": ("emulated", "1"), "host1": ("emulated", "1")}
    assert hosts(Fleet(2)) == {"host0": ("tiny", "1"), "host1": ("tiny", "1")}


def test_hosts_are_told_their_own_gpus_and_other_services_nothing() -> None:
    programs = services(ADDRESSES, Fleet(2, "vllm", gpus=("0,1", "GPU-5c1e,3")))
    told = {one.name: one.environment.get("CUDA_VISIBLE_DEVICES") for one in programs}
    assert (told.pop("host0"), told.pop("host1")) == ("0,1", "GPU-5c1e,3")
    assert set(told.values()) == {None}
    assert not any("CUDA_VISIBLE_DEVICES" in one.environment for one in services(ADDRESSES, Fleet(2, "vllm")))
