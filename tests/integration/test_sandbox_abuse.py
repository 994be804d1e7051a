"""What an agent may try: to get out, to see what is not its, to take more than its share, to forge its score.

Each is tried on both backends; where a container by its nature shows or allows more, the test says what and how far.
test_sandbox_abuse_list.py names the test of each entry of the list; some are in other modules.
"""

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from opengyre.proto.sandbox import RenewRequest
from opengyre.sandbox.bubblewrap import Bubblewrap
from opengyre.sandbox.core import InvalidRequest, Options, OutputLimit, SandboxError, SandboxGone, Spec
from opengyre.sandbox.docker import Docker
from support import both_backends, eventually
from support.abuse import Node
from support.both_backends import BOTH, needs, ready
from support.rootfs import needs_root, rootfs
from support.sandboxes import PYTHON, needs_python

pytestmark = [pytest.mark.sandbox]


@pytest.fixture(params=BOTH)
async def box(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Node]:
    async with ready(Node(request.param, tmp_path / "node")) as made:
        await made.create()
        if (await made.run(f"test -x {PYTHON}")).exit_code != 0:
            pytest.skip(f"the sandbox has no {PYTHON}, in which what is tried is written")
        yield made


async def python(box: Node, script: str, *arguments: str, sandbox: str = "s") -> dict:
    """Run a script in a sandbox; what it printed as JSON."""
    await box.manager.write(sandbox, "probe.py", script.encode(), 0o644)
    done = await box.run(f"{PYTHON} -I probe.py {' '.join(arguments)}", sandbox=sandbox)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


SYSTEM_CALLS = """
import ctypes, errno, json, os, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
done, refused = [], {}
def attempt(name, work):
    try:
        result = work()
    except OSError as error:
        refused[name] = errno.errorcode.get(error.errno, str(error.errno))
        return
    (done.append(name) if result is not False else refused.__setitem__(name, "False"))
def c(name, *arguments):
    def work():
        if getattr(libc, name)(*arguments) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    return work
def sys_(number, *arguments):
    return c("syscall", ctypes.c_long(number), *arguments)
def ptr(): return ctypes.create_string_buffer(256)
outside = int(sys.argv[1])
attempt("control: getpid", lambda: os.getpid() > 0)
attempt("control: fifo", lambda: os.mkfifo("/tmp/fifo"))
attempt("mount tmpfs", c("mount", b"none", b"/tmp", b"tmpfs", ctypes.c_ulong(0), None))
attempt("mount proc", c("mount", b"proc", b"/tmp", b"proc", ctypes.c_ulong(0), None))
attempt("bind mount", c("mount", b"/usr", b"/tmp", None, ctypes.c_ulong(4096), None))
attempt("remount writable", c("mount", None, b"/", None, ctypes.c_ulong(32 | 4096), None))
attempt("umount", c("umount2", b"/workspace", 2))
attempt("pivot_root", sys_(155, b"/tmp", b"/tmp"))
attempt("fsopen", sys_(430, b"tmpfs", 0))
attempt("open_tree", sys_(428, -100, b"/", 1))
for name, flag in {"user": 0x10000000, "mnt": 0x20000, "net": 0x40000000, "pid": 0x20000000}.items():
    attempt(f"unshare {name}", c("unshare", flag))
    attempt(f"setns {name} of the first process", lambda: c("setns", os.open(f"/proc/1/ns/{name}", 0), 0)())
for name, kind, device in (("memory", 0o020666, (1, 1)), ("disk", 0o060666, (8, 0)), ("null", 0o020666, (1, 3))):
    attempt(f"mknod {name}", lambda: os.mknod(f"/tmp/{name}", kind, os.makedev(*device)))
attempt("open_by_handle_at", sys_(304, -100, ptr(), 0))
attempt("ptrace the first process", c("ptrace", 16, 1, None, None))
attempt("memory of the first process", lambda: os.open("/proc/1/mem", os.O_RDWR))
attempt("root of the first process", lambda: os.listdir("/proc/1/root"))
attempt("descriptors of the first process", lambda: os.listdir("/proc/1/fd"))
attempt("environment of the first process", lambda: open("/proc/1/environ").read())
attempt("limits of the first process", c("prlimit64" if hasattr(libc, "prlimit64") else "prlimit", 1, 7, ptr(), None))
attempt("kill outside", lambda: os.kill(outside, 0))
attempt("signal a group outside", lambda: os.killpg(outside, 0))
attempt("setuid 0", lambda: os.setuid(0))
attempt("setgid 0", lambda: os.setgid(0))
attempt("setgroups", lambda: os.setgroups([0]))
attempt("chown", lambda: os.chown("/tmp/fifo", 0, 0))
attempt("sethostname", lambda: socket.sethostname("other"))
attempt("settimeofday", c("settimeofday", ptr(), None))
attempt("clock_settime", lambda: __import__("time").clock_settime(0, 0.0))
attempt("reboot", sys_(169, 0xfee1dead, 672274793, 0x1234567, None))
attempt("swapon", sys_(167, b"/tmp/fifo", 0))
attempt("init_module", sys_(175, ptr(), 256, b""))
attempt("kexec_load", sys_(246, 0, 0, None, 0))
attempt("acct", sys_(163, b"/tmp/fifo"))
attempt("syslog", sys_(103, 3, ptr(), 256))
attempt("bpf", sys_(321, 5, ptr(), 128))
attempt("iopl", sys_(172, 3))
attempt("raise priority", lambda: os.setpriority(os.PRIO_PROCESS, 0, -10))
attempt("real time", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10)))
def write(path, text):
    def work():
        with open(path, "w") as file:
            file.write(text)
    return work
attempt("lower own score", write("/proc/self/oom_score_adj", "-1000"))
attempt("core pattern", write("/proc/sys/kernel/core_pattern", "|/bin/sh"))
attempt("more namespaces", write("/proc/sys/user/max_user_namespaces", "100"))
attempt("drop caches", write("/proc/sys/vm/drop_caches", "3"))
attempt("sysrq", write("/proc/sysrq-trigger", "h"))
attempt("cgroups", lambda: os.listdir("/sys/fs/cgroup"))
attempt("kernel memory", lambda: os.open("/proc/kcore", os.O_RDONLY))
devices = ("sd", "vd", "nvme", "mem", "kmsg", "loop", "fuse")
attempt("a device of the machine", lambda: [name for name in os.listdir("/dev") if name.startswith(devices)] != [])
attempt("write /usr", write("/usr/x", ""))
attempt("write /etc/passwd", write("/etc/passwd", ""))
attempt("write /dev", write("/dev/x", ""))
attempt("packet socket", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3))
attempt("raw socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
def address():
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:
        body = struct.pack("BBBBI", socket.AF_INET, 24, 0, 0, 1) + struct.pack("HH4s", 8, 2, bytes([10, 1, 1, 1]))
        link.send(struct.pack("IHHII", 16 + len(body), 20, 0x605, 1, 0) + body)
        number = struct.unpack_from("i", link.recv(4096), 16)[0]
        if number:
            raise OSError(-number, os.strerror(-number))
attempt("add an address", address)
attempt("chroot", lambda: os.chroot("/tmp"))  # the last: nothing else is where it was
print(json.dumps({"done": done, "refused": refused}))
"""


async def test_abuse_no_system_call_leads_out(box: Node) -> None:
    found = await python(box, SYSTEM_CALLS, str(os.getpid()))
    assert set(found["done"]) == {"control: getpid", "control: fifo"} | SHOWN[box.kind], "all others were to fail"
    assert len(found["refused"]) > 50
    if "cgroups" in SHOWN[box.kind]:
        assert (await python(box, CGROUPS))["written"] == []
    assert (await box.run("echo ok")).stdout == "ok\n"


# A container sees its own limits and counters, read-only, as its engine mounts them.
SHOWN: dict[str, set[str]] = {"bubblewrap": set(), "docker": {"cgroups"}}
CGROUPS = """
import json, os
written, seen = [], 0
for folder, folders, files in os.walk("/sys/fs/cgroup"):
    seen += len(files)
    for path in [os.path.join(folder, name) for name in files if name in ("cgroup.procs", "tasks", "release_agent",
                 "notify_on_release", "memory.limit_in_bytes", "memory.max", "pids.max", "devices.allow")]:
        try:
            with open(path, "w") as file:
                file.write("0")
            written.append(path)
        except OSError:
            pass
    try:
        if "cgroup.procs" in files:  # what is above the groups is a tmpfs of the sandbox's own
            os.mkdir(os.path.join(folder, "made"))
            written.append(folder)
    except OSError:
        pass
print(json.dumps({"written": written, "seen": seen}))
"""
ROOT_MAY = {
    # In its own user namespace and on its own copy of the root; the first process is its own as well.
    "ptrace the first process", "memory of the first process", "root of the first process", "chown", "chroot",
    "descriptors of the first process", "environment of the first process", "limits of the first process",
    "setuid 0", "setgid 0", "setgroups", "write /usr", "write /etc/passwd",
    "control: getpid", "control: fifo",
}  # fmt: skip
HELD_BY_THE_FIRST = """
import ctypes, json, os
libc = ctypes.CDLL(None, use_errno=True)
first, taken, written = libc.syscall(434, 1, 0), 0, 0
for number in range(16):
    fd = libc.syscall(438, first, number, 0)
    if fd < 0:
        continue
    taken += 1
    try:
        for _ in range(32):
            written += os.write(fd, b"x" * (1 << 20))
    except OSError:
        pass
print(json.dumps({"taken": taken, "written": written}))
"""


def held_by(pid: int) -> list[str]:
    """What a process's descriptors are."""
    return [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()]


LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")
LOADER = "/machine/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2 --library-path /machine/lib/x86_64-linux-gnu"


@needs["bubblewrap"]
@needs_python
@needs_root
@pytest.mark.skipif(not LIBRARIES.is_dir(), reason="Python is started by the loader of a Debian on x86-64")
async def test_abuse_root_of_an_image_gets_nothing_of_the_machine(tmp_path: Path) -> None:
    """It may trace the first process of its sandbox, and so has what that holds: no file of the machine's."""
    root = rootfs(tmp_path / "images" / "small")
    backend = Bubblewrap(tmp_path / "node", binds={"/machine": "/usr"}, image_roots=[root.parent])
    await backend.start()
    spec = Spec(sandbox="s", image=str(root), disk_mb=8, memory_mb=64)
    run = f"PYTHONHOME=/machine {LOADER} /machine/bin/python3 -"
    try:
        await backend.create(spec, {})
        assert not [path for path in held_by(backend._live["s"].pid) if str(tmp_path) in path]
        for number, (script, arguments) in enumerate(((HELD_BY_THE_FIRST, ""), (SYSTEM_CALLS, str(os.getpid())))):
            options = Options(stdin=script.encode())
            done = await backend.exec(spec, f"e{number}", f"{run} {arguments}", 20.0, 65536, options)
            assert done.exit_code in (0, 137), done.stderr
            if number == 0:
                assert done.exit_code == 137 or json.loads(done.stdout)["taken"] >= 3, "it has them"
            else:
                assert set(json.loads(done.stdout)["done"]) - ROOT_MAY == set()
        size = sum(path.stat().st_blocks * 512 for path in (tmp_path / "node").rglob("*") if path.is_file())
        assert size < 4 << 20, "the machine's disk has nothing of it"
    finally:
        await backend.destroy("s")
        await backend.stop()


# Beside that: `/dev` of a container is a tmpfs of 64 MiB that its root may write to, within the sandbox's memory.
CONTAINERS_ROOT_MAY = ROOT_MAY | {"cgroups", "write /dev"}


@needs["docker"]
async def test_abuse_root_of_a_container_gets_nothing_of_the_machine(tmp_path: Path) -> None:
    async with ready(Node("docker", tmp_path / "node")) as box:
        await box.create(image=both_backends.IMAGE)
        if (await box.run(f"test -x {PYTHON}")).exit_code != 0:
            pytest.skip(f"the image has no {PYTHON}, in which what is tried is written")
        assert (await box.run("id -u")).stdout == "0\n"
        found = await python(box, SYSTEM_CALLS, str(os.getpid()))
        assert set(found["done"]) - CONTAINERS_ROOT_MAY == set()
        assert len(found["refused"]) > 40
        found = await python(box, CGROUPS)
        assert (found["written"], found["seen"] > 10) == ([], True)
        assert isinstance(box.backend, Docker)
        held = await asyncio.to_thread(held_by, box.backend._live["s"].first)
        assert {path for path in held if path.startswith("/")} <= {"/dev/null"}, "what it can take of the first process"
        assert (await box.run("cat /proc/kcore /proc/keys /proc/timer_list 2>/dev/null | wc -c")).stdout == "0\n"
        assert (await box.run("echo ok")).stdout == "ok\n"


SOCKETS = """
import json, socket, sys
found = {}
def attempt(name, family, address, kind=socket.SOCK_STREAM):
    with socket.socket(family, kind) as one:
        one.settimeout(0.5)
        try:
            one.connect(address)
            found[name] = "connected"
        except OSError as error:
            found[name] = type(error).__name__
port, abstract, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
attempt("tcp", socket.AF_INET, ("127.0.0.1", port))
attempt("tcp of the world", socket.AF_INET, ("192.0.2.1", 80))
attempt("tcp 6", socket.AF_INET6, ("::1", port))
attempt("abstract", socket.AF_UNIX, "\\0" + abstract)
attempt("path", socket.AF_UNIX, path)
attempt("docker", socket.AF_UNIX, "/var/run/docker.sock")
print(json.dumps(found))
"""


async def test_abuse_no_socket_of_the_machine_is_reached(box: Node, tmp_path: Path) -> None:
    abstract, path = f"gyre-test-{os.getpid()}", str(tmp_path / "s")
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as nameless,
    ):
        for listener, address in ((named, path), (nameless, f"\0{abstract}")):
            listener.bind(address)
            listener.listen()
        arguments = (str(tcp.getsockname()[1]), abstract, path)
        found = await python(box, SOCKETS, *arguments)
        outside = await asyncio.create_subprocess_exec(
            PYTHON, "-I", "-c", SOCKETS, *arguments, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await outside.communicate()
    seen = json.loads(output)
    assert (seen["tcp"], seen["abstract"], seen["path"]) == ("connected",) * 3, "they are there to be reached"
    assert "connected" not in found.values()
    assert len(found) == 6


OTHER_SHOWS = """
import socket, time
open("/workspace/secret", "w").write("s3cret")
open("/tmp/secret", "w").write("s3cret")
open("/dev/shm/secret", "w").write("s3cret")
tcp = socket.create_server(("127.0.0.1", 8123))
abstract = socket.socket(socket.AF_UNIX); abstract.bind("\\0secret"); abstract.listen()
open("/workspace/ready", "w").close()
time.sleep(600)
"""
OTHER_LOOKS = """
import json, os, socket
found = []
for folder in ("/workspace", "/tmp", "/dev/shm", "/logs"):
    found += [name for name in os.listdir(folder) if name == "secret"]
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        found += [pid for line in [open(f"/proc/{pid}/cmdline").read()] if "other.py" in line]
    except OSError:
        pass
for family, address in ((socket.AF_INET, ("127.0.0.1", 8123)), (socket.AF_UNIX, "\\0secret")):
    try:
        socket.socket(family).connect(address)
        found.append(str(address))
    except OSError:
        pass
found += [line for line in open("/proc/net/unix").read().split() if "secret" in line]
print(json.dumps({"found": found}))
"""


async def test_abuse_another_sandbox_is_not_seen(box: Node) -> None:
    await box.create("other", files={"other.py": OTHER_SHOWS})
    shows = asyncio.ensure_future(box.run(f"{PYTHON} -I other.py", sandbox="other", timeout_s=600.0))
    await eventually(lambda: _there(box, "other", "ready"))
    assert (await python(box, OTHER_LOOKS))["found"] == []
    there = await python(box, OTHER_LOOKS, sandbox="other")
    assert len(there["found"]) >= 6, "in the sandbox itself all of it is seen"
    await box.manager.destroy("other")
    with pytest.raises(SandboxGone):
        await shows


async def _there(box: Node, sandbox: str, path: str) -> bool:
    try:
        await box.manager.read(sandbox, path, 10)
    except InvalidRequest:
        return False
    return True


WATCHER = """
import os
seen = set()
while not os.path.exists("stop"):
    open("watching", "w").close()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) in (1, os.getpid()):
            continue
        for name in ("environ", "maps", "auxv"):
            try:
                with open(f"/proc/{pid}/{name}", "rb") as file:
                    seen.add(file.read(65536).decode("utf-8", "replace"))
            except OSError:
                pass
        for name in ("exe", "cwd", "root"):
            try:
                seen.add(os.readlink(f"/proc/{pid}/{name}"))
            except OSError:
                pass
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                seen.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            pass
print("\\n".join(seen))
"""


async def test_abuse_a_watcher_sees_nothing_of_what_starts_its_commands(
    box: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What starts a command, and what carries files, is in the sandbox for a moment: it shows none of its own."""
    monkeypatch.setenv("SECRET_OF_SERVICE", "hunter2-in-the-environment")
    await box.manager.write("s", "watch.py", WATCHER.encode(), 0o644)
    watching = asyncio.ensure_future(box.run(f"{PYTHON} -I watch.py", limit=1 << 20, timeout_s=250.0))
    await eventually(lambda: _there(box, "s", "watching"))
    for number in range(50 if box.kind == "bubblewrap" else 20):  # a container's commands take longer to start
        await box.run("true" if number % 5 else "sleep 0.1")
        await box.manager.write("s", "f", b"x", 0o644)
        await box.manager.read("s", "f", 10)
    await box.manager.write("s", "stop", b"", 0o644)
    seen = (await watching).stdout
    assert "GYRE_EXEC=" in seen, "it sees its own commands"
    assert "hunter2" not in seen
    assert "GYRE_EXEC=launcher" not in seen
    for line in seen.splitlines():
        assert str(box.root) not in line or line.endswith(("stdout", "stderr", " (deleted)")), line


async def test_abuse_what_is_no_regular_file_is_refused_and_never_waited_for(box: Node) -> None:
    await box.run(
        "mkfifo pipe; ln -s /dev/zero zero; ln -s /dev/full full; ln -s /dev/tty tty; mkdir folder; ln -s loop loop;"
        f"{PYTHON} -I -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'; truncate -s 15M sparse"
    )
    async with asyncio.timeout(100):
        for name in ("pipe", "zero", "full", "tty", "folder", "loop", "sock"):
            with pytest.raises(InvalidRequest, match="path"):
                await box.manager.read("s", name, 1000)
            if name not in ("folder", "loop", "tty"):
                with pytest.raises(InvalidRequest, match="path"):
                    await box.manager.write("s", name, b"x", 0o644)
        with pytest.raises(OutputLimit):
            await box.manager.read("s", "sparse", 1 << 20)
        done = await box.verify("test -p pipe || test -S sock", "[ $(stat -c %s sparse) = 15728640 ]", mode="separate")
    assert [part.passed for part in done.parts] == [0.0, 1.0], "what is no file, folder or link is not carried over"


@pytest.mark.parametrize("kind", BOTH)
async def test_abuse_more_files_than_memory_hurt_nobody_else(kind: str, tmp_path: Path) -> None:
    """Empty files take no room in a folder's size, but they do of the memory that a sandbox has."""
    async with ready(Node(kind, tmp_path / "node", Spec(sandbox="", workspace_mb=4, memory_mb=32, pids=32))) as box:
        if not box.backend.capabilities().memory_limit:
            pytest.skip("no memory cgroup can be made here")
        await box.create()
        await box.create("other")
        command = (
            f'{PYTHON} -I -c \'import itertools\nfor n in itertools.count(): open(f"/workspace/{{n}}", "w").close()\''
        )
        done = await box.run(command, timeout_s=200.0)
        assert done.exit_code != 0, "it came to an end of its own"
        assert not done.timed_out, "a bound stopped it, not its time"
        assert (await box.run("echo ok", sandbox="other")).stdout == "ok\n"
        assert (await box.manager.destroy("s")).existed


async def test_abuse_output_after_the_end_is_bounded(box: Node) -> None:
    """A child that is left behind keeps the file that its output went to: it cannot fill the machine's disk by that."""
    done = await box.run("mkfifo go; (read wait < go; exec yes) & echo done")
    assert (done.exit_code, done.stdout) == (0, "done\n")
    await box.run("echo > go; sleep 0.05")
    await eventually(lambda: _no_process(box, "yes"), 60.0)


async def _no_process(box: Node, name: str) -> bool:
    return (await box.run(f"cat /proc/[0-9]*/comm | grep -cx {name}")).stdout == "0\n"


async def test_abuse_names_that_are_not_utf8_harm_nothing(box: Node) -> None:
    await box.run(
        "printf x > \"$(printf 'a\\377b')\"; mkdir \"$(printf 'd\\376')\"; printf y > \"$(printf 'd\\376/\\301')\""
    )
    done = await box.run("ls -A | cat -v; export V=$(printf '\\377'); env | grep -ac V=")
    assert "aM-^?b" in done.stdout
    verdict = await box.verify("[ $(find . -type f | wc -l) = 2 ] && [ $(cat d*/*) = y ]", mode="separate")
    assert [part.passed for part in verdict.parts] == [1.0]


async def test_abuse_a_jump_of_the_clock_ends_nothing(box: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases and deadlines are of the monotonic clock; the wall clock of the machine is nobody's to set in there."""
    await box.create("long", ttl_s=30.0, idle_ttl_s=30.0)
    running = asyncio.ensure_future(box.run("sleep 0.6; echo whole", sandbox="long", timeout_s=60.0))
    real = time.time
    for jump in (-400 * 86400.0, 400 * 86400.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
        box.manager._wake.set()
        assert await box.manager._due() == []
        left = box.manager.renew(RenewRequest(sandbox="long", ttl_s=1.0)).expires_in_s
        assert 20 < left < 31
    assert (await running).stdout == "whole\n"
    assert (await box.run("sleep 5", timeout_s=0.3)).timed_out
    assert (await box.run("date -s '2001-01-01'")).exit_code != 0
    assert int((await box.run("date +%s")).stdout) == pytest.approx(real(), abs=10)


async def test_abuse_ids_that_mean_other_folders_are_refused(box: Node) -> None:
    for name in ("..", "a/b", "", "a.b", "x" * 97, "a\0b", "../s"):
        with pytest.raises(SandboxError, match="sandbox"):
            await box.create(name)
        with pytest.raises(SandboxError):
            await box.run("true", exec_id=name or "..")
    assert [info.sandbox for info in box.manager.listing({})] == ["s"]
