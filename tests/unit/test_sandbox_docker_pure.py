"""The pure parts of the Docker backend."""

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.sandbox import check, docker_config, docker_tar
from opengyre.sandbox.core import CannotIsolateError, InvalidRequest, Options, OutputLimit, Spec
from opengyre.sandbox.docker_spool import Begun, overdue
from opengyre.sandbox.service import docker_socket

NAMES = st.lists(st.sampled_from(["a", "b", "..", ".", "", "é"]), min_size=1, max_size=5).map("/".join)


def described(**more):
    return docker_config.container(
        Spec(sandbox="s", **more), key="k", image="i", control="/control", binds={"/opt/x": "/srv/x"}, storage=False
    )


def test_a_container_is_closed_whatever_its_spec():
    for more in ({}, {"image": "i"}, {"cpus": 0.5}, {"user": "root", "image": "i"}):
        host = described(**more)["HostConfig"]
        assert (host["NetworkMode"], host["Init"], host["CapDrop"]) == ("none", True, ["ALL"])
        assert host["SecurityOpt"] == ["no-new-privileges"]
        assert host["Memory"] == host["MemorySwap"] == 256 << 20
        assert 64 < host["PidsLimit"] < 100
        assert not {"SYS_ADMIN", "MKNOD", "NET_ADMIN", "SYS_PTRACE"} & set(host["CapAdd"])
        assert "/srv/x:/opt/x:ro" in host["Binds"]
        assert "Privileged" not in host
    assert described()["HostConfig"]["ReadonlyRootfs"]
    assert "size=16777216" in described()["HostConfig"]["Tmpfs"]["/workspace"]
    assert described(cpus=0.5)["HostConfig"]["NanoCpus"] == 500_000_000


def test_a_command_too_long_for_an_argument_is_in_no_argument():
    for size in (0, docker_config.INLINE_COMMAND, docker_config.INLINE_COMMAND + 1, 4 << 20):
        words = docker_config.run("e", b"x" * size)
        assert max(map(len, words)) < 128 << 10
        assert (words[-1] == "x" * size) is (size <= docker_config.INLINE_COMMAND)


def test_the_service_decides_the_marks_of_a_command():
    options = Options(env={"GYRE_EXEC": "mine", "A": "2"})
    found = docker_config.environment(Spec(sandbox="s", env={"A": "1", "B": "1"}), "k.s", "k.s.e", options)
    assert (found["A"], found["B"], found["GYRE_EXEC"], found["GYRE_SANDBOX"]) == ("2", "1", "k.s.e", "k.s")


@given(NAMES)
def test_a_name_stays_below_the_top_or_is_none(name: str):
    found = docker_tar.member_name(name)
    if found is None:
        assert name.startswith("/") or ".." in name.split("/")
    else:
        assert not found.startswith("/")
        assert ".." not in found.split("/")
        assert docker_tar.member_name(found) == found


def packed(*members: tuple[str, bytes, bytes, str]) -> io.BytesIO:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, kind, data, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname, info.uid, info.mode = kind, len(data), link, 1234, 0o4755
            archive.addfile(info, io.BytesIO(data))
    made.seek(0)
    return made


def test_what_is_special_or_elsewhere_is_left_out_and_nobody_owns_the_rest():
    source = packed(
        ("./d", tarfile.DIRTYPE, b"", ""),
        ("./d/f", tarfile.REGTYPE, b"text", ""),
        ("./d/l", tarfile.SYMTYPE, b"", "/anywhere"),
        ("./d/l/f", tarfile.REGTYPE, b"through a link", ""),
        ("./h", tarfile.LNKTYPE, b"", "./d/f"),
        ("./p", tarfile.FIFOTYPE, b"", ""),
        ("./c", tarfile.CHRTYPE, b"", ""),
        ("../x", tarfile.REGTYPE, b"out", ""),
        ("/y", tarfile.REGTYPE, b"out", ""),
    )
    target = io.BytesIO()
    done = docker_tar.filtered(source, target, limit=100, what="it", strict=False)
    assert (done.entries, done.skipped) == (4, 5)
    target.seek(0)
    with tarfile.open(fileobj=target) as archive:
        found = archive.getmembers()
    assert [one.name for one in found] == ["d", "d/f", "d/l", "h"]
    assert {(one.uid, one.mode) for one in found} == {(0, 0o755)}


@pytest.mark.parametrize(("limit", "fits"), [(7, True), (6, False)])
def test_the_limit_is_on_what_is_in_it(limit: int, fits: bool):
    source = packed(("a", tarfile.REGTYPE, b"1234", ""), ("b", tarfile.REGTYPE, b"567", ""))
    if fits:
        assert docker_tar.filtered(source, io.BytesIO(), limit=limit, what="it", strict=True).entries == 2
        return
    with pytest.raises(OutputLimit, match="limit of 6 bytes"):
        docker_tar.filtered(source, io.BytesIO(), limit=limit, what="it", strict=True)


@given(st.binary(max_size=2000))
def test_bytes_that_are_no_archive_are_refused_or_empty(data: bytes):
    try:
        done = docker_tar.filtered(io.BytesIO(data), io.BytesIO(), limit=10**6, what="it", strict=True)
    except InvalidRequest:
        return
    assert done.entries == 0


@pytest.mark.parametrize(
    ("now", "written", "grew_at", "why"),
    [
        (9.9, (0, 0), 9.0, None),
        (10.0, (0, 0), 0.0, "timeout"),
        (1.0, (5, 1000), 0.0, "output"),
        (1.0, (5, 999), 0.0, None),
        (4.0, (5, 5), 1.0, "no_output"),
        (3.9, (5, 5), 1.0, None),
    ],
)
def test_when_a_command_is_overdue(now: float, written: tuple[int, int], grew_at: float, why: str | None):
    begun = Begun(
        digest="", began=0.0, since=0, timeout_s=10.0, limit=1, spool_limit=1000, no_output_timeout_s=3.0, oom_kills=0
    )
    assert overdue(begun, now, written, grew_at) == why


@pytest.mark.parametrize("name", ["debian", "python:3.11-slim", "registry.example.org:5000/team/task_1:v1.2"])
def test_an_image_has_the_names_that_engines_give(name: str):
    assert check.image_reference(name) == name


@pytest.mark.parametrize("name", ["", "..", "a/../b", "a//b", "a/", ".a", "a b", "a/.b", "x" * 300])
def test_an_image_has_no_name_that_could_be_a_path(name: str):
    with pytest.raises(InvalidRequest, match="image is"):
        check.image_reference(name)


@pytest.mark.parametrize(
    ("setting", "host", "found"),
    [
        (None, None, "/var/run/docker.sock"),
        (None, "", "/var/run/docker.sock"),
        (None, "unix:///run/user/1000/docker.sock", "/run/user/1000/docker.sock"),
        ("/srv/docker.sock", "unix:///other", "/srv/docker.sock"),
        ("/srv/docker.sock", "tcp://elsewhere:2376", "/srv/docker.sock"),
    ],
)
def test_the_engine_is_where_the_setting_or_dockers_own_variable_says(setting, host, found):
    assert str(docker_socket(setting, host)) == found


@pytest.mark.parametrize("host", ["tcp://elsewhere:2376", "ssh://me@elsewhere", "unix://relative"])
def test_an_engine_of_another_machine_is_refused_by_name(host):
    with pytest.raises(CannotIsolateError, match=f"DOCKER_HOST is '{host}'; allowed is unix:///"):
        docker_socket(None, host)
