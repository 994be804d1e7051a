"""The contract: what was released stays readable, what is generated is up to date, subjects hold what they should."""

import json
from pathlib import Path
from typing import ClassVar, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.proto import codec, generate, ids, run, subjects
from opengyre.proto.base import Event, tag_of
from opengyre.proto.examples import examples
from opengyre.shared.bus import Stored

GOLDEN = sorted((generate.ROOT / "golden").glob("*.json"))


def test_generated_documents_are_up_to_date() -> None:
    assert generate.drift() == []


def kept(released: object, now: object) -> bool:
    """Whether everything that was released is still there, at any depth; what was added since does not matter."""
    if isinstance(released, dict):
        return isinstance(now, dict) and all(key in now and kept(value, now[key]) for key, value in released.items())
    if isinstance(released, list):
        return isinstance(now, list) and len(released) == len(now) and all(map(kept, released, now))
    return released == now


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_payload_still_decodes(path: Path) -> None:
    payload = path.read_bytes().strip()
    event = codec.decode(payload)
    released = json.loads(payload)
    now = json.loads(codec.encode(event))
    assert kept(released, now), "a released field was lost or changed its meaning"


def test_every_event_type_has_an_example_and_a_golden_payload() -> None:
    known = {kind.__struct_config__.tag for kind in get_args(codec.AnyEvent)}
    assert known == {tag_of(event) for event in examples()} == {path.stem for path in GOLDEN}


@pytest.mark.parametrize("event", examples(), ids=tag_of)
def test_event_has_type_first_one_line_and_an_ascii_identity(event: Event) -> None:
    payload = codec.encode(event)
    assert payload.startswith(f'{{"type":"{tag_of(event)}"'.encode())
    assert b"\n" not in payload
    assert codec.decode(payload) == event
    assert event.event_id().isascii()
    assert event.event_id().replace("-", "").replace("_", "").isalnum()
    assert event.stream in subjects.STREAM_SUBJECTS


def test_identities_of_different_events_differ() -> None:
    identities = [event.event_id() for event in examples()]
    assert len(set(identities)) == len(identities)


def test_unknown_fields_are_ignored_and_unknown_types_are_refused() -> None:
    event = examples()[0]
    document = json.loads(codec.encode(event))
    assert codec.decode(json.dumps({**document, "later": 1}).encode()) == event
    with pytest.raises(codec.UndecodableError):
        codec.decode(json.dumps({**document, "type": "task.nothing.v9"}).encode())
    with pytest.raises(codec.UndecodableError):
        codec.decode(b"\xff\x00 garbage")


def test_an_upcaster_turns_a_former_version_into_todays(monkeypatch: pytest.MonkeyPatch) -> None:
    event = next(e for e in examples() if tag_of(e) == "weights.applied.v1")
    former = json.loads(codec.encode(event))
    former["type"] = "weights.applied.v0"
    former["seconds"] = former.pop("duration_s")

    def up(document: dict[str, object]) -> dict[str, object]:
        return {**document, "type": "weights.applied.v1", "duration_s": document["seconds"]}

    monkeypatch.setitem(codec.UPCASTERS, "weights.applied.v0", up)
    assert codec.decode(json.dumps(former).encode(), "weights.applied.v0") == event
    monkeypatch.setitem(codec.UPCASTERS, "weights.applied.v0", lambda d: d)
    with pytest.raises(codec.UndecodableError, match="circle"):
        codec.decode(json.dumps(former).encode(), "weights.applied.v0")


@given(st.text(max_size=120))
def test_a_token_that_passes_is_one_token_of_a_subject(value: str) -> None:
    allowed = bool(value) and len(value) <= 96 and all(c.isascii() and (c.isalnum() or c in "_-") for c in value)
    if allowed:
        assert ids.check_token("task", value) == value
        assert len(subjects.task("r", value, "submitted").split(".")) == 6
    else:
        with pytest.raises(ids.BadIdentifierError, match="task"):
            ids.check_token("task", value)


@given(st.integers(0, 10**9), st.integers(0, 10**4))
def test_an_execution_knows_its_group_and_run(sequence: int, member: int) -> None:
    group = ids.group_id("r_1", sequence)
    execution = ids.execution_id(group, member)
    assert ids.group_of(execution) == group
    assert ids.run_of(execution) == ids.run_of(group) == "r_1"
    ids.check_token("execution", execution)


@pytest.mark.parametrize(
    ("dispatch", "field"),
    [
        (run.Dispatch(mu=0), "dispatch.mu"),
        (run.Dispatch(phi=-0.5), "dispatch.phi"),
        (run.Dispatch(batch_groups=0), "dispatch.batch_groups"),
        (run.Dispatch(group_size=4, min_members=5), "dispatch.min_members"),
        (run.Dispatch(phi=0.3, batch_groups=8), "phi"),
    ],
)
def test_a_setting_out_of_range_is_named_with_what_is_allowed(dispatch: run.Dispatch, field: str) -> None:
    spec = run.RunSpec(run="r", model="m", dispatch=dispatch)
    with pytest.raises(run.InvalidRunError, match=field):
        run.validate(spec)
    assert run.validate(run.RunSpec(run="r", model="m")).dispatch.mu == 2


def test_asyncapi_document_names_every_stream_and_resolves_every_reference() -> None:
    document = json.loads((generate.ROOT / "asyncapi.json").read_text())
    references: list[str] = []

    def walk(value: object) -> None:
        if isinstance(value, dict):
            if isinstance(ref := value.get("$ref"), str):
                references.append(ref)
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(document)
    for ref in references:
        target: object = document
        for part in ref.removeprefix("#/").split("/"):
            assert isinstance(target, dict)
            assert part in target, ref
            target = target[part]
    assert set(document["channels"]) == set(subjects.STREAM_SUBJECTS) - {subjects.ADVISORY}


class _NotInContract(Event, frozen=True, kw_only=True, tag="x.y.v1"):
    stream: ClassVar[str] = "X"


def test_an_event_outside_the_contract_cannot_come_back() -> None:
    with pytest.raises(codec.UndecodableError):
        codec.decode(msgspec.json.encode(_NotInContract()))


def test_an_event_that_is_nested_too_deeply_is_undecodable_and_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    payload = b'{"type":"traj.call.v1","x":' + b"[" * 100_000
    with pytest.raises(codec.UndecodableError, match="nested too deeply"):
        codec.decode(payload)
    assert Stored(subject="gyre.v1.traj.r.g.e.call", sequence=7, payload=payload).readable() is None
    assert "message 7 on gyre.v1.traj.r.g.e.call is passed over" in caplog.text
