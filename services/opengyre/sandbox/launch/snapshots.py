"""What a sandbox wrote, kept and given to another one; its processes are stopped meanwhile.

With an image that is the overlay's upper folder, copied as it is: whiteouts, owners and attributes are part of it, and
it becomes one more lower layer of what is forked. Without one it is the content of `WRITABLE`, as a file of records
(see `copying`), which is written into the new sandbox as its user.
"""

import os
import signal
from collections.abc import Callable

from opengyre.sandbox.launch import copying, kernel, tree
from opengyre.sandbox.launch.files import WRITABLE, FileError, Giving, Place
from opengyre.sandbox.launch.mounts import HIDDEN

CP = "/bin/cp"


def stopped(place: Place, work: Callable[[], None]) -> None:
    """Call ``work()`` in a child while all that runs in the sandbox is stopped; a failure there is a `FileError`."""
    told_read, told_write = os.pipe()
    done_read, done_write = os.pipe()
    holder = os.fork()
    if holder == 0:
        try:
            os.close(told_read)
            os.close(done_write)
            kernel.enter(place.pid, place.started)
            inner = os.fork()
            if inner:
                os.close(told_write)
                os.waitpid(inner, 0)
                os._exit(0)
            held = tree.stop_everything()
            try:
                os.write(told_write, b"s")
                os.read(done_read, 1)  # also ends with the process that would write it
            finally:
                tree.go_on(held)
        finally:
            os._exit(0)
    os.close(told_write)
    os.close(done_read)
    try:
        if os.read(told_read, 1) != b"s":
            raise ProcessLookupError(place.pid)
        work()
    finally:
        os.close(done_write)
        os.close(told_read)
        os.waitpid(holder, 0)


def keep_layer(place: Place, target: str) -> None:
    """Copy the upper folder of a sandbox with an image into the folder ``target``, which is made."""
    os.mkdir(target, 0o755)

    def work() -> None:
        child = os.fork()
        if child == 0:
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(copying.BOUND_S)
                binary = os.open(CP, os.O_RDONLY | os.O_CLOEXEC)
                kernel.enter_mounts(place.pid, place.started, f"{HIDDEN}/upper")
                null = os.open("/dev/null", os.O_RDWR)
                for fd in range(3):
                    os.dup2(null, fd)
                os.execve(binary, ["cp", "-a", "--", ".", target], {"LC_ALL": "C"})  # noqa: S606 - there is no shell to want
            finally:
                os._exit(126)
        status = kernel.wait_status(child)
        if status == 128 + signal.SIGALRM:
            raise FileError("exec_timeout", f"the snapshot took more than {copying.BOUND_S} s; it holds too much")
        if status != 0:
            raise FileError("infra_error", f"the snapshot could not be taken: cp ended with {status}")

    stopped(place, work)


def keep_records(place: Place, target: str, most_bytes: int) -> None:
    """Write what is in the folders of a sandbox without an image into the file ``target``."""

    def work() -> None:
        child = os.fork()
        if child == 0:
            _records(place, target, most_bytes)
        if kernel.wait_status(child) != 0:
            raise FileError("infra_error", "the snapshot could not be taken")

    stopped(place, work)


def _records(place: Place, target: str, most_bytes: int) -> None:
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(copying.BOUND_S)
        with open(target, "wb") as stream:
            kernel.enter(place.pid, place.started, kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
            kernel.keep_reading_only()
            kernel.set_undumpable()
            try:
                for root in WRITABLE:
                    copying.Reader(stream.write, most_bytes).take(root)
            except (OSError, FileError) as error:
                stream.write(copying.fault(error))
        os._exit(0)
    finally:
        os._exit(1)


def giving(source: str, cgroups: list[str]) -> Giving:
    """What fills the empty folders of a new sandbox with what `keep_records` wrote. All is opened at once: it is read
    when the sandbox was entered.
    """
    joins = [os.open(path, os.O_WRONLY | os.O_CLOEXEC) for path in cgroups]
    stream = open(source, "rb")  # noqa: SIM115 - read in a child, whose end closes it

    def join() -> None:
        for fd in joins:
            os.write(fd, b"0")

    def work() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(copying.BOUND_S)
        for root in WRITABLE:
            os.chdir(root)
            copying.put(stream)

    return join, work
