"""What a verifier's run and files say, where an environment comes from, and what COPY brings. Pure."""

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.proto.sandbox import Capabilities, ExecResult
from opengyre.proto.task import TaskEnvironment, TaskTests
from opengyre.sandbox.core import InvalidRequest, Spec
from opengyre.sandbox.origin import origin, specified
from opengyre.sandbox.verdict import of_tests
from opengyre.tasks.archives import contents, members, squeeze, unsqueeze
from opengyre.tasks.copying import copied
from opengyre.tasks.dockerfile import Copy
from opengyre.tasks.errors import TaskError

RAN = ExecResult(
    exec_id="e", exit_code=1, stdout="out\n", stderr="", stdout_bytes=4, stderr_bytes=0, stdout_truncated=False,
    stderr_truncated=False, timed_out=False, duration_s=1.0, isolated=True,
)  # fmt: skip
CAN = Capabilities(
    backend="b", isolated=True, network_none=True, network_allowlist=False, fork=True, snapshot=True, disk_limit=True,
    cpu_limit=True, memory_limit=True, pids_limit=True, images=True, root_directories=False, background=True,
    users=True,
)  # fmt: skip


def tar(**files: str) -> bytes:
    """``a__b`` is the file b in the folder a."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        folders = dict.fromkeys(name.rpartition("__")[0].replace("__", "/") for name in files if "__" in name)
        for folder in folders:
            made = tarfile.TarInfo(folder)
            made.type = tarfile.DIRTYPE
            archive.addfile(made)
        for name, text in files.items():
            info = tarfile.TarInfo(name.replace("__", "/"))
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return stream.getvalue()


@given(st.dictionaries(st.from_regex(r"[a-z]{1,6}", fullmatch=True), st.floats(0, 1), min_size=1, max_size=6))
def test_shares_of_a_score_sum_to_one_and_values_are_the_rewards(rewards: dict[str, float]) -> None:
    import json

    said = of_tests(TaskTests(archive=b""), "v", RAN, {"reward.json": json.dumps(rewards).encode()}, isolated=True)
    assert said.valid
    assert {part.name: part.passed for part in said.parts} == rewards
    assert abs(sum(part.weight for part in said.parts) - 1) < 1e-9


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"timed_out": True, "exit_code": None}, "ran into its timeout"),
        ({"exit_code": None, "killed_by": "output"}, "was killed (output)"),
        ({"exit_code": 137, "oom": True}, "ended by SIGKILL as its sandbox was out of memory"),
        ({"exit_code": 0, "oom": True}, "ran out of memory"),
    ],
)
def test_an_interrupted_verifier_says_nothing_whatever_it_left(changes: dict[str, object], words: str) -> None:
    ran = ExecResult(**{name: getattr(RAN, name) for name in RAN.__struct_fields__} | changes)  # type: ignore[arg-type]  # fields by name
    said = of_tests(TaskTests(archive=b""), "v", ran, {"reward.txt": b"0"}, isolated=True)
    assert (said.valid, said.parts, said.rewards) == (False, (), {})
    assert words in (said.infra_error or "")


def test_a_weight_for_a_reward_that_is_not_there_is_a_fault() -> None:
    said = of_tests(TaskTests(archive=b"", weights={"x": 1.0}), "v", RAN, {"reward.txt": b"1"}, isolated=True)
    assert said.infra_error == "reward 'x' has a weight but the tests left only 'reward'"


def test_a_report_that_cannot_be_read_spoils_only_what_needs_it() -> None:
    files = {"reward.txt": b"1", "ctrf.json": b"{"}
    assert of_tests(TaskTests(archive=b""), "v", RAN, files, isolated=True).rewards == {"reward": 1.0}
    said = of_tests(TaskTests(archive=b"", score="progress"), "v", RAN, files, isolated=True)
    assert "ctrf.json is not JSON" in (said.infra_error or "")
    said = of_tests(TaskTests(archive=b"", score="progress"), "v", RAN, {"reward.txt": b"1"}, isolated=True)
    assert "score = 'progress' needs one" in (said.infra_error or "")


def test_a_base_is_an_image_here_or_stood_in_for_or_refused() -> None:
    environment = TaskEnvironment(dockerfile="FROM docker.io/library/ubuntu:24.04\nWORKDIR /app\nCMD x\n")
    here = origin(environment, {"ubuntu:24.04", "host"}, stand_in="host", node="n")
    assert (here.image, here.sentence) == (
        "ubuntu:24.04",
        "image ubuntu:24.04, replayed 2 of 3 instructions (CMD passed over)",
    )
    other = origin(environment, {"host"}, stand_in="host", node="n")
    assert other.sentence.startswith("host root in place of docker.io/library/ubuntu:24.04")
    named = origin(TaskEnvironment(image="x/y"), {"x/y:latest", "base:1"}, stand_in="base:1", node="n")
    assert (named.image, named.sentence) == ("x/y:latest", "image x/y:latest")
    for stand_in in (None, "elsewhere"):
        with pytest.raises(InvalidRequest, match=r"wants the base .* not on n; allowed are its images \(host\)"):
            origin(environment, {"host"}, stand_in=stand_in, node="n")


def test_a_sandbox_is_as_its_task_asks_where_the_node_can_hold_it() -> None:
    environment = TaskEnvironment(
        dockerfile="FROM a\nENV A=1 B=1\nUSER me\nWORKDIR /w", env={"B": "2"}, memory_mb=2048, cpus=2, storage_mb=10
    )
    made = origin(environment, {"a:latest"}, stand_in=None, node="n")
    spec = specified(Spec(sandbox="s", memory_mb=256), environment, made, CAN)
    assert (spec.image, spec.env, spec.workdir, spec.user) == ("a:latest", {"A": "1", "B": "2"}, "/w", "me")
    assert (spec.memory_mb, spec.cpus, spec.disk_mb) == (2048, 2, 10)
    for asked, limit in ((64, 64), (None, 256)):  # a limit below the node's own is one too
        little = TaskEnvironment(dockerfile="FROM a", memory_mb=asked)
        assert specified(Spec(sandbox="s", memory_mb=256), little, made, CAN).memory_mb == limit


CONTEXT = tar(a="1", b__x="2", b__y="3", b__c__z="4")


@pytest.mark.parametrize(
    ("sources", "target", "folder", "place", "names"),
    [
        (("a",), "/app/new", False, "/app", {"new"}),
        (("a",), "/app", True, "/app", {"a"}),
        (("b",), "/app/b", False, "/app/b", {"x", "y", "c", "c/z"}),
        (("b/*",), "/app", True, "/app", {"x", "y", "z"}),
        ((".",), "/app", True, "/app", {"a", "b", "b/x", "b/y", "b/c", "b/c/z"}),
        (("a", "b/x"), "/app", True, "/app", {"a", "x"}),
    ],
)
def test_copy_brings_what_docker_would(
    sources: tuple[str, ...], target: str, folder: bool, place: str, names: set[str]
) -> None:
    step = Copy(sources=sources, target=target, folder=folder, owner=None, mode=None, line=3)
    at, archive, paths = copied(CONTEXT, step)
    assert (at, {member.name for member in members(archive)}) == (place, names)
    assert set(paths) == {f"{place}/{name.split('/')[0]}" for name in names}


def test_a_source_that_is_not_there_is_said() -> None:
    with pytest.raises(TaskError, match="line 3: 'q' is not in the build context"):
        copied(CONTEXT, Copy(sources=("q",), target="/", folder=True, owner=None, mode=None, line=3))


@given(st.binary(max_size=2000))
def test_archives_come_out_as_they_went_in_and_never_larger(data: bytes) -> None:
    assert unsqueeze(squeeze(data)) == data
    with pytest.raises(TaskError, match="damaged"):
        unsqueeze(squeeze(data)[:-1])
    with pytest.raises(TaskError, match="allowed"):
        unsqueeze(squeeze(data + b"x"), len(data))


@given(st.binary(max_size=300))
def test_no_bytes_break_what_reads_archives(data: bytes) -> None:
    for read in (contents, members, unsqueeze):
        try:
            read(data)
        except TaskError:
            continue
