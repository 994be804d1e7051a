"""What an operator does to a live run, by REST and by the command line: change it, stop it, steer its cells, read its
decisions; and bad input, which is one sentence and changes nothing."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from opengyre.gateway import examples
from opengyre.gateway.decisions import start_of_last
from opengyre.proto import subjects
from opengyre.proto.decision import AdmissionInput, CellView, Decision, PolicyInput, RoleChange
from opengyre.proto.host import HostState, HostStatus
from opengyre.proto.run import Dispatch, Elastic, RunSpec
from opengyre.shared.bus import Bucket, Bus
from support import eventually
from support.gateway_cli import Gyre, gyre_on
from support.gateway_fakes import FakeAllocator

RUN = examples.RUN_IN


@pytest.fixture
async def gyre(bus: Bus, tmp_path: Path) -> AsyncIterator[Gyre]:
    async with gyre_on(bus, tmp_path) as made:
        await made.running.given(201, "POST", "/v1/runs", RUN)
        await eventually(lambda: "demo" in made.running.gateway.deps.run_view.values)
        yield made


async def present(gyre: Gyre, bus: Bus, *hosts: str) -> None:
    for host in hosts:
        status = HostStatus(
            host=host, cell=host, boot="b", state=HostState.ROLLOUT, epoch=1, url="http://x", engine="tiny"
        )
        await Bucket(bus, subjects.KV_HOSTS, HostStatus).put(host, status, ttl_s=60)
    await eventually(lambda: gyre.running.gateway.deps.cells() == set(hosts))


async def spec_of(bus: Bus) -> RunSpec:
    found = await Bucket(bus, subjects.KV_RUNS, RunSpec).get("demo")
    assert found is not None
    return found[0]


async def test_a_live_run_is_changed_field_by_field_and_the_rest_stays(gyre: Gyre, bus: Bus) -> None:
    before = await spec_of(bus)
    change = {"dispatch": {"phi": 1, "mu": 1, "close_at": 7, "d_max": 3}, "elastic": {"policy": "static", "gate": 0}}
    report = await gyre.running.given(200, "PATCH", "/v1/runs/demo", change)
    after = await spec_of(bus)
    assert after.dispatch == msgspec.structs.replace(before.dispatch, phi=1.0, mu=1, close_at=7, d_max=3)
    assert after.elastic == msgspec.structs.replace(before.elastic, policy="static", gate=0.0)
    assert msgspec.structs.replace(after, dispatch=before.dispatch, elastic=before.elastic) == before
    assert msgspec.convert(report["spec"], RunSpec) == after
    shown = await gyre.shown("run", "set", "demo", "dispatch.phi=0.5", "dispatch.d_max=null", "elastic.policy=fine")
    assert "dispatch.phi is 0.5, dispatch.d_max is -, elastic.policy is fine, E[d] becomes 0.5" in shown
    assert (await spec_of(bus)).dispatch.d_max is None
    assert (await gyre.json("run", "set", "demo", "elastic.max_train_cells=2"))["spec"]["elastic"][
        "max_train_cells"
    ] == 2


async def test_changes_at_the_same_time_are_all_there_at_the_end(gyre: Gyre, bus: Bus) -> None:
    changes = [
        {"dispatch": {"phi": 2}},
        {"dispatch": {"d_max": 9}},
        {"elastic": {"gate": 1}},
        {"elastic": {"dwell_s": 3}},
    ]
    await asyncio.gather(*(gyre.running.given(200, "PATCH", "/v1/runs/demo", change) for change in changes))
    spec = await spec_of(bus)
    assert (spec.dispatch.phi, spec.dispatch.d_max, spec.elastic.gate, spec.elastic.dwell_s) == (2.0, 9, 1.0, 3.0)


REFUSED = [
    ({"dispatch": {"mu": 0}}, "dispatch.mu is 0; allowed are values from 1 to 64"),
    ({"dispatch": {"phi": -0.5}}, "dispatch.phi is -0.5; allowed are values from 0 to 64"),
    ({"dispatch": {"phi": 0.3}}, "(phi + mu) * batch_groups is 18.4 groups; choose phi so that it is a whole number"),
    ({"dispatch": {"close_at": 1}}, "dispatch.close_at is 1; allowed are values from 2 to 8"),
    ({"dispatch": {"close_at": 9}}, "dispatch.close_at is 9; allowed are values from 2 to 8"),
    ({"dispatch": {"d_max": 0}}, "dispatch.d_max is 0; allowed are values from 1 to 10000"),
    ({"dispatch": {"mu": "two"}}, "dispatch.mu is 'two': input should be a valid integer"),
    ({"dispatch": {"batch_groups": 4}}, "dispatch.batch_groups cannot change while the run goes on"),
    (
        {"dispatch": {"group_size": 4}},
        "dispatch.group_size cannot change while the run goes on (the updates and groups under way",
    ),
    ({"harness": {"max_turns": 9}}, "harness cannot change while the run goes on (the episodes under way"),
    ({"model": "/x"}, "model cannot change while the run goes on (its weights are what is trained); allowed: state"),
    ({"dispatch": {"psi": 1}}, "unknown field psi; allowed: phi, mu, close_at"),
    (
        {"elastic": {"policy": "best"}},
        "elastic.policy is 'best': input should be 'fine', 'static', 'global' or 'coarse'",
    ),
    (
        {"elastic": {"min_rollout_cells": 3, "max_rollout_cells": 2}},
        "elastic.max_rollout_cells is 2; allowed are values from 3 to 10000",
    ),
    (
        {"elastic": {"min_train_cells": 2, "max_train_cells": 1}},
        "elastic.max_train_cells is 1; allowed are values from 2 to 10000",
    ),
    (
        {"elastic": {"min_rollout_cells": 2, "min_train_cells": 1}},
        "elastic.min_rollout_cells is 2, 3 together, but there are 2 cells; allowed is a sum of at most 2",
    ),
    ({"state": "active"}, "state is 'active': input should be 'stopped'"),
    ({}, "the body changes nothing; allowed: state, dispatch, elastic"),
]


OUT_OF_RANGE = [one for one in REFUSED if "; allowed are values from" in one[1] or "choose phi" in one[1]] + [
    one for one in REFUSED if "a sum of at most" in one[1]
]
"""What a new run may not have, either."""


def as_fields(change: dict[str, Any]) -> list[str]:
    """A change as `gyre run set` takes it."""
    fields: list[str] = []
    for part, value in change.items():
        if isinstance(value, dict):
            fields += [f"{part}.{name}={json.dumps(inner)}" for name, inner in value.items()]
        else:
            fields.append(f"{part}={json.dumps(value)}")
    return fields


async def test_a_change_that_is_not_allowed_is_one_sentence_and_changes_nothing(gyre: Gyre, bus: Bus) -> None:
    await present(gyre, bus, "host0", "host1")
    before = await spec_of(bus)
    for change, sentence in REFUSED:
        detail = await gyre.running.refused(422, "PATCH", "/v1/runs/demo", change)
        assert sentence in detail, change
        assert "\n" not in detail
        if change:
            assert sentence in await gyre.refused("run", "set", "demo", *as_fields(change))
    assert await spec_of(bus) == before


async def test_a_run_with_what_is_not_allowed_is_not_made(gyre: Gyre, bus: Bus) -> None:
    await present(gyre, bus, "host0", "host1")
    await gyre.shown("run", "stop", "demo")
    for change, sentence in OUT_OF_RANGE:
        wanted = {**RUN, "run": "second", **{part: {**RUN[part], **change[part]} for part in change}}
        assert sentence in await gyre.running.refused(422, "POST", "/v1/runs", wanted), change
    assert await Bucket(bus, subjects.KV_RUNS, RunSpec).get("second") is None


RECIPE = """\
[run]
run = "second"
model = "/somewhere"
[run.dispatch]
{dispatch}
[run.elastic]
{elastic}
[tasks]
generator = "shelltasks"
count = 4
"""


async def test_a_recipe_with_what_is_not_allowed_makes_no_run(gyre: Gyre, bus: Bus, tmp_path: Path) -> None:
    await present(gyre, bus, "host0", "host1")
    await gyre.shown("run", "stop", "demo")
    recipe = tmp_path / "bad.toml"
    for change, sentence in OUT_OF_RANGE:
        text = {part: "\n".join(f"{name} = {value}" for name, value in change[part].items()) for part in change}
        recipe.write_text(RECIPE.format(**{"dispatch": "", "elastic": "", **text}))
        assert sentence in await gyre.refused("run", str(recipe)), change
    assert await Bucket(bus, subjects.KV_RUNS, RunSpec).get("second") is None


async def test_a_run_that_there_is_is_found_again_though_a_cell_is_lost(gyre: Gyre, bus: Bus) -> None:
    await present(gyre, bus, "host0", "host1")
    wanted = {**RUN, "run": "second", "elastic": {"min_rollout_cells": 1, "min_train_cells": 1}}
    await gyre.shown("run", "stop", "demo")
    report = await gyre.running.given(201, "POST", "/v1/runs", wanted)
    await Bucket(bus, subjects.KV_HOSTS, HostStatus).delete("host1")
    await eventually(lambda: gyre.running.gateway.deps.cells() == {"host0"})
    assert await gyre.running.given(201, "POST", "/v1/runs", wanted) == report


@pytest.mark.parametrize(
    "fields", [["dispatch.phi"], ["=1"], ["dispatch.=1"], [".phi=1"], ["dispatch.phi=1", "dispatch.phi=2"]]
)
async def test_what_is_no_change_is_one_sentence(gyre: Gyre, fields: list[str]) -> None:
    assert "allowed is FIELD=VALUE like dispatch.phi=1" in await gyre.refused("run", "set", "demo", *fields)


async def test_a_run_is_stopped_once_and_stays_so(gyre: Gyre, bus: Bus) -> None:
    assert "there is no run nope; there are: demo" in await gyre.refused("run", "stop", "nope")
    assert "run demo is stopped after update 0" in await gyre.shown("run", "stop", "demo")
    assert (await gyre.json("run", "stop", "demo"))["spec"]["state"] == "stopped", "again is the same answer"
    refused = await gyre.refused("run", "set", "demo", "dispatch.phi=1")
    assert "run demo is stopped; allowed is to change or stop an active run" in refused
    assert [run["state"] for run in await gyre.json("run", "ls")] == ["stopped"]
    assert "stopped" in await gyre.shown("run", "ls")
    assert (await spec_of(bus)).dispatch.phi == 0.5


async def test_stopping_a_run_says_that_its_live_executions_go_on(gyre: Gyre, bus: Bus) -> None:
    async with FakeAllocator("demo").answering(bus):
        said = await gyre.shown("run", "stop", "demo")
    assert "run demo is stopped after update 0" in said
    assert "16 executions go on to their end" in said


async def test_a_cell_that_is_in_no_pool_is_refused_by_name(gyre: Gyre, bus: Bus) -> None:
    async with FakeAllocator("demo").answering(bus) as allocator:
        for wish in ("drain", "resume", "cordon"):
            detail = await gyre.running.refused(404, "POST", f"/v1/cells/c9/{wish}")
            assert detail == "there is no cell c9; there are: host0"
            assert detail in await gyre.refused(wish, "c9")
        assert "wish is 'retire'" in await gyre.running.refused(422, "POST", "/v1/cells/host0/retire")
        assert "there is no host h9" in await gyre.running.refused(404, "POST", "/v1/hosts/h9/drain")
        assert allocator.wishes == []
        cells = await gyre.running.given(200, "GET", "/v1/cells")
        assert [cell["cell"] for cell in cells["cells"]] == ["host0"]


def decisions() -> list[Decision]:
    cell = CellView(
        cell="host0", hosts=("host0",), state=HostState.ROLLOUT, settled=True, since_s=9.0, capacity=32, running=0,
        wish="train",
    )  # fmt: skip
    given = PolicyInput(cells=(cell,), live_executions=3, ready_groups=0.5, dispatch=Dispatch(), elastic=Elastic())
    train = RoleChange(cell="host0", role="train", reason="an operator's wish")
    room = AdmissionInput(
        dispatch=Dispatch(), updates=None, state="active", finished=False, published=0, kept_executions=0,
        unconsumed_executions=0, waiting=2, most=64,
    )  # fmt: skip
    return [
        Decision(
            run="demo", decision="1-0", kind="admission", admission=room, version=0, unconsumed=0,
            admitted=("demo-g000000", "demo-g000001"),
        ),
        Decision(run="demo", decision="1-1", kind="wish", wish="drain", changes=(train,), note="x"),
        Decision(run="demo", decision="1-2", kind="roles", input=given, changes=(train,), suspends=True),
        Decision(run="demo", decision="2-0", kind="admission", admitted=("demo-g000002",), note="begun before"),
    ]  # fmt: skip


async def test_decisions_are_listed_paged_and_decided_again(gyre: Gyre, bus: Bus, tmp_path: Path) -> None:
    for decision in decisions():
        await bus.publish(subjects.decision("demo"), decision)
    await bus.publish(subjects.decision("none"), Decision(run="none", decision="0-0", kind="roles"))
    first = await gyre.running.given(200, "GET", "/v1/decisions?run=demo&limit=3")
    rest = await gyre.running.given(200, "GET", f"/v1/decisions?run=demo&after={first['next']}&inputs=false")
    both = [*first["decisions"], *rest["decisions"]]
    assert [one["decision"]["decision"] for one in both] == ["1-0", "1-1", "1-2", "2-0"]
    assert (rest["next"], first["decisions"][0]["decision"]["admission"]["waiting"]) == (None, 2)
    assert rest["decisions"][0]["decision"]["admission"] is None
    lines = (await gyre.shown("decisions", "ls", "demo", "--limit", "3")).splitlines()
    assert len(lines) == 3
    assert "1-2 roles     host0 to train [episodes are SUSPENDED]: an operator's wish" in lines[1]
    assert "1 groups at version None, demo-g000002 (begun before)" in lines[2]
    assert [one["decision"]["decision"] for one in await gyre.lines("decisions", "ls", "none")] == ["0-0"]

    report = await gyre.json("decisions", "replay", "demo")
    assert (report["decisions"], report["without_inputs"], report["differences"]) == (4, 1, [])
    assert "every one comes out the same" in await gyre.shown("decisions", "replay")

    forged = msgspec.structs.replace(decisions()[0], decision="1-9", admitted=("demo-g000000",))
    await bus.publish(subjects.decision("demo"), forged)
    report = await gyre.json("decisions", "replay", "demo", code=1)
    (difference,) = report["differences"]
    assert (difference["decision"], difference["field"]) == ("1-9", "admitted")
    assert (difference["recorded"], difference["decided"]) == (1, 2)
    assert "1-9" in await gyre.shown("decisions", "replay", "demo", code=1)

    saved = tmp_path / "decisions.jsonl"
    await gyre.shown("stream", "replay", "DECISIONS", "--out", str(saved))
    assert (await gyre.json("decisions", "replay", "demo", "--from", str(saved), code=1))["decisions"] == 5
    saved.write_text("{}\n")
    assert "line 1 holds no decision" in await gyre.refused("decisions", "replay", "--from", str(saved))
    assert "there is no run nope" in await gyre.refused("decisions", "replay", "nope")


async def test_the_last_decisions_are_found_among_those_of_another_run(gyre: Gyre, bus: Bus) -> None:
    for number in range(60):
        run = "demo" if number % 10 == 0 else "other"
        await bus.publish(subjects.decision(run), Decision(run=run, decision=f"1-{number}", kind="roles"))
    last = await gyre.running.given(200, "GET", "/v1/decisions?run=demo&limit=2&last=true")
    assert [one["decision"]["decision"] for one in last["decisions"]] == ["1-40", "1-50"]
    assert await start_of_last(bus, subjects.DECISIONS, subjects.decision("demo"), 200) == 1


async def test_decisions_are_followed_until_interrupted(gyre: Gyre, bus: Bus) -> None:
    first, second = decisions()[:2]
    await bus.publish(subjects.decision("demo"), first)
    words = ["decisions", "ls", "demo", "--follow", "--json", "--state-dir", str(gyre.state)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "opengyre.cli", *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        for decision in (first, second):
            async with asyncio.timeout(90):
                line = await process.stdout.readline()
            assert json.loads(line)["decision"]["decision"] == decision.decision
            await bus.publish(subjects.decision("demo"), second)
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(60):
            out, errors = await process.communicate()
        assert (process.returncode, out, errors) == (0, b"", b"")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_knobs_are_translated_without_a_stack(gyre: Gyre) -> None:
    (made,) = await gyre.plain("knobs", "verl", "staleness_threshold=0.5", "trigger_parameter_sync_step=4")
    assert (made["phi"], made["mu"], made["staleness"], made["exact"]) == (2.0, 4, 3.5, True)
    assert len(await gyre.plain("knobs", "--phi", "0.5", "--mu", "2")) == 5
    for words, sentence in (
        (("areal", "max_head_offpolicyness=-1"), "allowed are whole values from 0 to 64"),
        (("areal", "max_head_offpolicyness"), "is no knob; allowed is KNOB=NUMBER"),
        (("slime",), "there is no system 'slime'; allowed: areal, verl"),
        ((), "name a system and its knobs, or --phi and --mu"),
        (("--mu", "0"), "mu is 0; allowed are whole values from 1 to 64"),
        (("areal", "max_head_offpolicyness=1", "--phi", "1"), "allowed is one of the two"),
    ):
        assert sentence in await gyre.refused_plain("knobs", *words)


async def test_waits_say_what_holds_the_run_back(gyre: Gyre, bus: Bus) -> None:
    await gyre.shown("run", "set", "demo", "elastic.min_rollout_cells=2")
    async with FakeAllocator("demo").answering(bus):
        shown = await gyre.shown("waits")
        assert "held: elastic.min_rollout_cells is 2, and 1 cell can be in that role" in shown
        assert "held: the depth (phi + mu) * batch_groups of 20 groups is full: 20 are unconsumed" in shown
        report = await gyre.json("waits")
        assert len(report["held"]) == 2
        assert (await gyre.json("status", code=1))["held"] == report["held"]
    assert "what holds the run back is not known: allocator does not answer" in await gyre.shown("waits")
