"""The sandbox's decisions: no I/O, no clock."""

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.proto.sandbox import Capabilities, ExecRequest, ExecResult, SandboxSpec, VerifyRequest
from opengyre.proto.task import Check
from opengyre.sandbox import cgroups, check, commands, jail, machine
from opengyre.sandbox.core import InvalidRequest, Options, Spec
from opengyre.sandbox.evaluate import clean, failed, is_clean, is_of, lasts_s
from opengyre.sandbox.launch import leader
from opengyre.sandbox.launch.output import join_text, split_sizes
from opengyre.sandbox.launch.tree import Process, belonging
from opengyre.sandbox.lease import Effect, Event, Lease, State, advance
from opengyre.sandbox.verdict import judge, verdict

DEFAULTS = Spec(sandbox="", workspace_mb=16, memory_mb=256, pids=64)


def result(code: int | None, **more: Any) -> ExecResult:
    fields: dict[str, Any] = {
        "exec_id": "e",
        "exit_code": code,
        "stdout": "out",
        "stderr": "",
        "stdout_bytes": 3,
        "stderr_bytes": 0,
        "stdout_truncated": False,
        "stderr_truncated": False,
        "timed_out": False,
        "duration_s": 0.1,
        "isolated": True,
    }
    return ExecResult(**(fields | more))


# Life and lease


def test_every_state_ends_when_it_is_destroyed():
    for state in State:
        after, effects = advance(state, Event.DESTROY)
        assert after in (State.DESTROYING, State.GONE)
        assert (Effect.REMOVE in effects) == (state is not State.GONE)


def test_what_was_under_way_ends_after_a_destroy_without_bringing_it_back():
    for event in (Event.CREATED, Event.FAILED, Event.VERIFIED):
        assert advance(State.DESTROYING, event) == (State.DESTROYING, ())
        assert advance(State.GONE, event) == (State.GONE, ())


def test_only_a_ready_sandbox_begins_a_verification():
    for state in State:
        if state is State.READY:
            assert advance(state, Event.VERIFY)[0] is State.VERIFYING
        else:
            with pytest.raises(ValueError, match="cannot be verify"):
                advance(state, Event.VERIFY)


def test_no_sequence_of_events_leaves_gone():
    reached = {state for state, event in itertools.product((State.GONE,), Event) if _try(state, event) is state}
    assert reached == {State.GONE}
    assert all(_try(State.GONE, event) in (State.GONE, None) for event in Event)


def _try(state: State, event: Event) -> State | None:
    try:
        return advance(state, event)[0]
    except ValueError:
        return None


times = st.floats(0, 1e6)
spans = st.floats(0.1, 1e5)


@given(times, spans, spans, times, spans)
def test_bug_29_a_renewal_never_shortens_a_lease(now: float, ttl: float, idle: float, later: float, more: float):
    lease = Lease.begin(now, ttl, idle)
    renewed = lease.renewed(now + later, more)
    for running in (False, True):
        assert renewed.ends_at(running) >= lease.ends_at(running)
    assert renewed.ends_at(running=True) >= now + later + more


@given(times, spans, spans, times)
def test_a_use_moves_the_idle_bound_and_not_the_lease(now: float, ttl: float, idle: float, later: float):
    lease = Lease.begin(now, ttl, idle)
    used = lease.used(now + later)
    assert used.expires_at == lease.expires_at
    assert used.ends_at(running=False) <= lease.expires_at
    assert used.ends_at(running=False) >= lease.ends_at(running=False)
    assert lease.ends_at(running=True) == lease.expires_at


# Output


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 20))
def test_head_and_tail_fit_the_limit(total: int, limit: int):
    head, tail = split_sizes(total, limit)
    assert head + tail == min(total, limit)


@given(st.text(), st.integers(0, 60))
def test_bug_12_a_cut_makes_no_replacement_character(text: str, limit: int):
    data = text.encode("utf-8", "replace")
    head, tail = split_sizes(len(data), limit)
    joined = join_text(data[:head], data[len(data) - tail :] if tail else b"", len(data))
    assert ("\ufffd" in joined) <= ("\ufffd" in data.decode())
    if len(data) <= limit:
        assert joined == data.decode()
    else:
        assert "bytes left out" in joined


def test_bug_13_what_is_left_out_is_counted():
    data = b"x" * 10_001
    head, tail = split_sizes(len(data), 10_000)
    assert "[... 1 bytes left out ...]" in join_text(data[:head], data[-tail:], len(data))


# What belongs to an exec


def row(pid: int, parent: int, *, session: int = 0, started: int = 100, marker: str | None = None) -> Process:
    return Process(pid, parent, session, started, marker)


def test_tree_holds_children_escaped_and_unmarked_but_not_another_exec_or_what_was_before():
    table = [
        row(1, 0, started=1),
        row(10, 0, marker="a"),
        row(11, 10, marker="a"),
        row(12, 1, marker="a"),  # orphaned
        row(13, 1, started=101),  # orphaned, its environment cleared
        row(14, 13, started=102),
        row(20, 0, marker="b", started=101),
        row(21, 20, marker="b", started=101),
        row(30, 1, started=50),  # an unmarked process of an earlier exec
        row(31, 0, marker="launcher", started=102),
    ]
    assert belonging(table, 0, "a", since=100) == {10, 11, 12, 13, 14}


def test_tree_does_not_judge_by_age_who_is_only_just_becoming_a_program():
    """It shows no environment just then, and so another command's was taken for unmarked."""
    table = [row(1, 0), row(10, 0, marker="a"), row(11, 10), row(12, 1), row(13, 12), row(20, 0)]
    for one in table[2:]:
        one.arriving = True
    assert belonging(table, 0, "a", since=100) == {10, 11}  # by its parent


def test_tree_without_a_namespace_takes_no_strangers():
    table = [row(1, 0), row(5, 1, started=200), row(10, 1, session=10), row(11, 10), row(12, 1, session=10)]
    assert belonging(table, 10, "a", since=None) == {10, 11, 12}


@given(st.lists(st.tuples(st.integers(2, 40), st.integers(0, 40), st.sampled_from([None, "a", "b"])), max_size=30))
def test_tree_is_closed_under_children_and_never_the_first_process(rows: list[tuple[int, int, str | None]]):
    table = [row(1, 0)] + [row(pid, parent, marker=marker) for pid, parent, marker in rows]
    found = belonging(table, 0, "a", since=None)
    assert 1 not in found
    assert all(one.pid in found for one in table if one.parent in found and one.pid != 1)


# Requests


@pytest.mark.parametrize("bad", ["", "../x/..", "../etc/passwd", "/etc/passwd", "/workspace", "a\0b", "/tmp/../etc/x"])
def test_a_path_outside_is_refused_with_a_sentence(bad: str):
    with pytest.raises(InvalidRequest, match="allowed is a file under /workspace, /tmp or /logs"):
        check.path("path", bad)


@given(st.text(max_size=80))
def test_a_path_is_refused_or_inside(text: str):
    try:
        full = check.path("path", text)
    except InvalidRequest:
        return
    assert full.startswith(("/workspace/", "/tmp/", "/logs/"))
    assert ".." not in full.split("/")


def spec(**fields: object) -> SandboxSpec:
    return SandboxSpec(**({"sandbox": "s1", "owner": "o"} | fields))  # type: ignore[arg-type]  # fields by keyword, checked at run time


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sandbox", "a.b"),
        ("sandbox", "x" * 97),
        ("owner", ""),
        ("memory_mb", -1),
        ("workspace_mb", 0),
        ("pids", 0),
        ("ttl_s", float("nan")),
        ("idle_ttl_s", -1.0),
        ("env", {"A B": "x"}),
        ("env", {"GYRE_EXEC": "x"}),
        ("files", {"../x": ""}),
    ],
)
def test_a_bad_field_is_named(field: str, value: object):
    with pytest.raises(InvalidRequest, match=f"{field}.*allowed"):
        check.spec(spec(**{field: value}), DEFAULTS)


def test_what_is_not_said_is_the_nodes():
    made, files = check.spec(spec(pids=5, files={"a/b": "x"}), DEFAULTS)
    assert (made.workspace_mb, made.memory_mb, made.pids) == (16, 256, 5)
    assert files == {"/workspace/a/b": "x"}


def test_bug_41_a_command_has_a_deadline_without_asking():
    assert ExecRequest(sandbox="s", exec_id="e", command="true").timeout_s > 0
    with pytest.raises(InvalidRequest, match="timeout_s"):
        check.execution(ExecRequest(sandbox="s", exec_id="e", command="true", timeout_s=float("inf")))


def test_checks_must_have_names_of_their_own():
    same = Check(name="a", command="true", weight=1.0)
    with pytest.raises(InvalidRequest, match="share a name"):
        check.verification(VerifyRequest(sandbox="s", verify_id="v", checks=(same, same)))


# Verdicts

CHECK = Check(name="c", command="x", weight=0.5)


@pytest.mark.parametrize(("code", "passed"), [(0, 1.0), (1, 0.0), (2, 0.0), (126, 0.0), (127, 0.0), (139, 0.0)])
def test_an_exit_status_is_a_score(code: int, passed: float):
    part = judge(CHECK, result(code))
    assert (part.passed, part.error) == (passed, None)


@pytest.mark.parametrize(
    "bad", [result(137), result(None, killed_by="output"), result(None, timed_out=True, killed_by="timeout")]
)
def test_a_check_that_was_killed_is_not_a_zero(bad: ExecResult):
    part = judge(CHECK, bad)
    whole = verdict("v", [part], 2, isolated=True)
    assert part.error is not None
    assert not whole.valid
    assert whole.infra_error == part.error


def test_a_check_that_is_missing_is_not_a_zero():
    assert not verdict("v", [judge(CHECK, result(0))], 2, isolated=True).valid
    assert verdict("v", [judge(CHECK, result(0)), judge(CHECK, result(1))], 2, isolated=True).valid


# The machine

MOUNTS = """\
30 20 0:26 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
31 30 0:27 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
32 30 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
33 30 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate
"""


def test_cgroups_are_made_below_our_own():
    found = cgroups.find_mounts(MOUNTS, "4:memory:/docker/abc/sub\n0::/user.slice/x\n")
    assert {name: (str(mount.own), mount.v2) for name, mount in found.items()} == {
        "memory": ("/sys/fs/cgroup/memory/sub", False),
        "cpu": ("/sys/fs/cgroup/cpu,cpuacct", False),
        "unified": ("/sys/fs/cgroup/unified/user.slice/x", True),
    }


def test_trap_04_every_tmpfs_has_a_size():
    args = jail.arguments(DEFAULTS, "m", own_ids=True)
    places = [place for place, word in enumerate(args) if word == "--tmpfs"]
    assert len(places) == 4
    assert all(args[place - 2] == "--size" and int(args[place - 1]) > 0 for place in places)
    assert args[args.index("--chdir") - 4 : args.index("--chdir")] == ["--remount-ro", "/dev", "--remount-ro", "/"]


def test_trap_14_limits_never_ask_for_more_memory_than_the_group_gives():
    assert "AS" not in jail.limits(DEFAULTS, memory_by_cgroup=True)
    assert jail.limits(DEFAULTS, memory_by_cgroup=False)["AS"] == 256 << 20


# Evaluations apart

IDS = st.from_regex(r"[A-Za-z0-9_-]{1,96}", fullmatch=True)


@given(sandbox=IDS, other=IDS, evaluation=IDS)
def test_a_clean_sandbox_is_nobody_elses(sandbox: str, other: str, evaluation: str):
    """No id of a caller's names one, and each belongs to the sandbox that it was made for and to no other."""
    made = clean(msgspec.structs.replace(DEFAULTS, sandbox=sandbox, env={"HOME": "/x", "A": "b"}), evaluation)
    assert is_clean(made.sandbox)
    assert not is_clean(sandbox)
    assert is_of(made.sandbox, sandbox)
    assert is_of(made.sandbox, other) == (other == sandbox)
    assert made.env == {"HOME": "/tmp", "A": "b"}
    assert (made.workspace_mb, made.memory_mb, made.pids) == (16, 256, 64)
    with pytest.raises(InvalidRequest):
        check.identifier("sandbox", made.sandbox)


def test_an_evaluation_that_could_not_begin_is_not_valid():
    checks = tuple(Check(name=f"c{number}", command="true", weight=0.5) for number in range(2))
    request = VerifyRequest(sandbox="s", verify_id="v", checks=checks, timeout_s=10.0)
    found = failed(request, "no memory is left", isolated=True)
    assert (found.valid, found.infra_error, found.parts) == (False, "no memory is left", ())
    assert lasts_s(request) > 20.0


# Users, capabilities, options

PASSWD = "root:x:0:0:root:/root:/bin/sh\nbroken\nbig:x:99999:1::/:\nworker:x:12:34::/home/w:/bin/sh\nodd:x:a:b::/:\n"


@pytest.mark.parametrize(
    ("user", "found"),
    [
        ("root", (0, 0, "root", "/root")),
        ("worker", (12, 34, "worker", "/home/w")),
        ("12", (12, 34, "worker", "/home/w")),
        ("worker:7", (12, 7, "worker", "/home/w")),
        ("77", (77, 77, "77", "/")),
        ("77:8", (77, 8, "77", "/")),
    ],
)
def test_users_are_found_by_name_and_number(user: str, found: tuple[int, int, str, str]):
    assert leader.find_user(PASSWD, user) == found


@pytest.mark.parametrize("user", ["nobody", "odd", "big", "65535", "worker:staff", "worker:65535"])
def test_users_that_cannot_be_had_are_refused(user: str):
    with pytest.raises(leader.RefusedError, match=r"allowed"):
        leader.find_user(PASSWD, user)


NOTHING = Capabilities(
    backend="none", isolated=False, network_none=False, network_allowlist=False, fork=False, snapshot=False,
    disk_limit=False, cpu_limit=False, memory_limit=False, pids_limit=False, images=False, root_directories=False,
    background=False, users=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "capability"),
    [
        ({"image": "a"}, "images"),
        ({"image": "/a"}, "root_directories"),
        ({"network": "allowlist"}, "network_allowlist"),
        ({"cpus": 1.0}, "cpu_limit"),
        ({"disk_mb": 5}, "disk_limit"),
        ({"user": "root"}, "users"),
    ],
)
def test_what_a_backend_cannot_do_is_refused_by_name(fields: dict, capability: str):
    spec = Spec(sandbox="s", **fields)
    check.capable(Spec(sandbox="s"), NOTHING)
    with pytest.raises(InvalidRequest, match=f"needs the capability '{capability}', which none has not"):
        check.capable(spec, NOTHING)
    check.capable(spec, msgspec.structs.replace(NOTHING, **{capability: True}))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cwd": ""}, "cwd is ''"),
        ({"cwd": "a\0"}, "cwd is"),
        ({"env": {"GYRE_EXEC": "x"}}, "env has 'GYRE_EXEC'"),
        ({"user": "-x"}, "user is '-x'"),
        ({"stdin": bytes((4 << 20) + 1)}, "stdin has"),
        ({"no_output_timeout_s": 0.0}, "no_output_timeout_s is 0"),
    ],
)
def test_options_of_a_command_are_checked(fields: dict, words: str):
    with pytest.raises(InvalidRequest, match=words):
        check.options(ExecRequest(sandbox="s", exec_id="e", command="true", **fields))


def test_an_exec_id_stands_for_the_command_and_how_it_runs():
    plain = commands.digest("a")
    assert plain == commands.digest("a", Options())
    different = {commands.digest("a", Options(cwd="/")), commands.digest("a", Options(stdin=b"x")), plain}
    assert len(different) == 3
    assert commands.digest("a", Options(env={"A": "1", "B": "2"})) == commands.digest(
        "a", Options(env={"B": "2", "A": "1"})
    )


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a b", "x" * 200])
def test_names_of_images_are_one_file_name(name: str):
    with pytest.raises(InvalidRequest, match="image is"):
        check.image_name(name)


def test_a_sandbox_with_an_image_has_its_root_and_nothing_of_the_machines():
    args = jail.image_arguments("m", {})
    assert args[args.index("--bind") + 2] == "/"
    assert "--ro-bind" not in args
    assert args[args.index("--cap-drop") + 1] == "ALL"
    mounting, tracing, devices, network, modules = 21, 19, 27, 12, 16
    assert not any(jail.ROOT_CAPABILITIES >> bit & 1 for bit in (mounting, tracing, devices, network, modules, 2))


@pytest.mark.parametrize(
    ("effective", "may"),
    [
        ("000001ffffffffff", True),
        ("00000000a80425fb", False),  # root in a container of Docker
        ("00000000002001c0", False),  # SYS_ADMIN, but no SYS_CHROOT
        ("00000000002401cb", True),
    ],
)
def test_root_without_the_rights_makes_no_roots_of_images(effective: str, may: bool) -> None:
    assert machine.may_mount(f"Name:\tx\nCapPrm:\t000001ffffffffff\nCapEff:\t{effective}\nCapBnd:\t0\n") is may
