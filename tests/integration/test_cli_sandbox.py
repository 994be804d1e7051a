"""`gyre sandbox` and `gyre bench sandbox` on a real bus with a real sandbox service."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from opengyre.proto.sandbox import DestroyRequest, DestroyResult, SandboxRef, SandboxSpec
from opengyre.shared.bus import Bus, call, discover
from support import eventually
from support.gyre_command import Gyre
from support.sandboxes import needs_sandboxes

pytestmark = [pytest.mark.sandbox, needs_sandboxes]


@pytest.fixture
async def gyre(bus: Bus, nats_server, tmp_path: Path) -> AsyncIterator[Gyre]:
    """With two sandboxes on node `n5`."""
    made = Gyre(nats_server.url, tmp_path / "state")
    environment = {
        **os.environ, "GYRE_BUS__URL": made.url, "GYRE_STATE_DIR": str(made.state), "GYRE_SANDBOX__NODE": "n5",
    }  # fmt: skip
    log = tmp_path / "service.log"
    command = [sys.executable, "-m", "opengyre.sandbox"]
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=out, stderr=out)
    for name, run in (("a", "r1"), ("b", "r2")):
        spec = SandboxSpec(sandbox=name, owner=f"owner-{name}", labels={"run": run}, files={"f": f"in {name}\n"})
        await call(bus, "sandbox", "any", "create", spec, SandboxRef, timeout_s=20, patience_s=60)
    yield made
    for name in ("a", "b"):
        await call(bus, "sandbox", "n5", "destroy", DestroyRequest(sandbox=name), DestroyResult)
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(60):
        assert await process.wait() == 0, log.read_text()[-3000:]


async def test_sandboxes_are_listed_used_read_and_removed(gyre: Gyre, bus: Bus) -> None:
    assert await discover(bus, "gyre-sandbox-") == ["gyre-sandbox-any", "gyre-sandbox-n5"]
    assert await discover(bus, "nothing-") == []

    status, shown, _ = await gyre("sandbox", "ls")
    assert status == 0
    assert all(word in shown for word in ("owner-a", "run=r1", "owner-b", "n5"))
    status, shown, _ = await gyre("sandbox", "ls", "--label", "run=r2", "--json")
    assert [one["sandbox"] for one in json.loads(shown)] == ["b"]

    assert await gyre("sandbox", "exec", "a", "cat", "f;", "echo oops >&2;", "exit", "3") == (3, "in a\n", "oops\n")
    status, _, said = await gyre("sandbox", "exec", "--timeout", "0.3", "a", "sleep 9")
    assert (status, "killed: timeout" in said) == (124, True)
    status, shown, _ = await gyre("sandbox", "exec", "--json", "--id", "long", "a", "seq 1 400000")
    answer = json.loads(shown)
    assert (status, answer["stdout_truncated"]) == (0, True)

    status, shown, said = await gyre("sandbox", "logs", "a", "long")
    assert (status, said) == (0, "")
    assert shown == "".join(f"{number}\n" for number in range(1, 400001)), (
        "what is shortened in the answer is all there"
    )
    status, shown, _ = await gyre("sandbox", "logs", "a", "long", "--offset", "-7", "--json")
    assert json.loads(shown)["total"] == answer["stdout_bytes"]

    assert (await gyre("sandbox", "gc", "--label", "run=r1", "--older-than", "1h"))[:2] == (0, "")
    assert (await gyre("sandbox", "gc", "--label", "run=r1", "--dry-run"))[:2] == (0, "a\n")
    assert (await gyre("sandbox", "gc", "--label", "run=r1"))[:2] == (0, "a\n")
    status, shown, _ = await gyre("sandbox", "ls", "--json")
    assert [one["sandbox"] for one in json.loads(shown)] == ["b"]

    status, shown, _ = await gyre("sandbox", "doctor")
    assert status == 0
    assert "node n5: bubblewrap, 1 of" in shown
    status, shown, _ = await gyre("sandbox", "doctor", "--json")
    document = json.loads(shown)
    assert document["nodes"][0]["capabilities"]["isolated"] is True
    assert {one["name"] for one in document["machine"]} >= {"bubblewrap", "cgroups"}


async def test_logs_follow_a_command_to_its_end(gyre: Gyre) -> None:
    text = "echo one; while [ ! -e go ]; do sleep 0.1; done; echo two"
    running = asyncio.ensure_future(gyre.program("sandbox", "exec", "--id", "slow", "a", text))

    async def begun() -> bool:
        return (await gyre("sandbox", "logs", "a", "slow"))[1] == "one\n"

    await eventually(begun, 60.0)
    following = asyncio.ensure_future(gyre.program("sandbox", "logs", "a", "slow", "--follow"))
    await asyncio.sleep(0.5)
    assert not following.done()
    await gyre("sandbox", "exec", "a", "touch go")
    assert (await following)[:2] == (0, "one\ntwo\n")
    assert (await running)[:2] == (0, "one\ntwo\n")


FAULTS = (
    (("exec", "none", "true"), "sandbox 'none' is on no node"),
    (("ls", "--node", "n9"), "node 'n9' does not answer; there are: n5"),
    (("ls", "--label", "x"), "--label is 'x'; allowed is KEY=VALUE"),
    (("logs", "a", "none"), "none"),
    (("logs", "a", "e", "--stream", "both"), "--stream is 'both'; allowed: stdout, stderr"),
    (("gc", "--older-than", "soon"), "--older-than is 'soon'"),
)


async def test_a_fault_is_one_sentence(gyre: Gyre) -> None:
    for arguments, sentence in FAULTS:
        status, shown, said = await gyre("sandbox", *arguments)
        assert (status, shown) == (1, ""), arguments
        assert sentence in said
        assert len(said.splitlines()) == 1


async def test_without_a_bus_the_machine_is_looked_at_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opengyre.cli.stream_read.CONNECT_S", 0.3)
    gyre = Gyre("nats://127.0.0.1:9", tmp_path / "state")
    status, shown, _ = await gyre("sandbox", "doctor")
    assert status == 0
    assert "nodes: NATS at nats://127.0.0.1:9 does not answer" in shown
    status, _, said = await gyre("sandbox", "ls")
    assert (status, "does not answer" in said) == (1, True)
    assert await gyre("sandbox", "gc") == (0, "", "0 removed\n")


async def test_the_network_of_a_sandbox_is_shown_with_what_was_denied(gyre: Gyre, bus: Bus) -> None:
    spec = SandboxSpec(sandbox="n", owner="o", network="allowlist", allowed_hosts=("a.org", "*.b.org"))
    await call(bus, "sandbox", "any", "create", spec, SandboxRef, timeout_s=20, patience_s=60)
    try:
        connect = "printf 'CONNECT evil.org:443 HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3"
        code, out, _ = await gyre("sandbox", "exec", "n", f'bash -c "exec 3<>/dev/tcp/127.0.0.1/3128; {connect}"')
        assert code == 0
        assert "host 'evil.org' may not be reached from here; allowed: a.org, *.b.org" in out
        code, out, _ = await gyre("sandbox", "network", "n")
        said = "requests: 1, denied: 1, sent: 0 B, received: 0 B"
        assert (code, out.splitlines()) == (0, ["may reach: a.org *.b.org", said, "denied: evil.org:443 1 times"])
        facts = json.loads((await gyre("sandbox", "network", "n", "--json"))[1])
        assert facts["denials"] == {"evil.org:443": 1}
        assert (await gyre("sandbox", "network", "a"))[1] == "no network\n"
        assert (await gyre("sandbox", "network", "nobody"))[2].startswith("gyre: sandbox 'nobody' is on no node")
    finally:
        await call(bus, "sandbox", "n5", "destroy", DestroyRequest(sandbox="n"), DestroyResult, timeout_s=20)
