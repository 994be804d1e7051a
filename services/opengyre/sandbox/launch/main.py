"""The launcher's loop: one packet a request, one forked child an answer. Ends when the service is gone.

Requests and answers are JSON packets on the socket ``argv[1]``. Each request has an ``id``; a child answers
``{"id": ..., "ok": {...}}`` or ``{"id": ..., "error": [kind, message]}``. An exec is answered when it was claimed,
before it runs: its end is the end of the process named in the answer.
"""

import gc
import json
import os
import signal
import socket
import sys

from opengyre.sandbox.launch import archives, copying, create, execs, files, kernel, mounts, snapshots, tree

PACKET = 1 << 18


def _exec(request: dict, answer) -> None:
    try:
        start = execs.Start(request)
        signals = execs.take_signals()
        where = execs.claim(request["folder"], request["digest"])
    except FileNotFoundError:
        raise ProcessLookupError(request["folder"]) from None
    if where is None:
        answer({"ok": None})
        return
    answer({"ok": {"pid": os.getpid(), "started": kernel.start_time(os.getpid())}})
    execs.monitor(where, start, signals)


def _create(request: dict, answer) -> None:
    answer({"ok": create.create(request)})


def _write(request: dict, answer) -> None:
    joins = [os.open(path, os.O_WRONLY | os.O_CLOEXEC) for path in request["cgroups"]]
    with open(request["source"], "rb") as file:

        def work() -> None:
            files.write(request["path"], file, request["mode"])

        files.inside(files.Place.of(request), work, before=lambda: _join(joins))
    answer({"ok": {}})


def _read(request: dict, answer) -> None:
    into = os.open(request["target"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def work() -> None:
        files.read(request["path"], request["limit"], into)

    files.inside(files.Place.of(request), work)
    answer({"ok": {}})


def _put(request: dict, answer) -> None:
    """Unpack an archive of the machine in the sandbox."""
    found: list[int] = []
    joins = [os.open(path, os.O_WRONLY | os.O_CLOEXEC) for path in request["cgroups"]]
    with open(request["source"], "rb") as source:

        def work() -> None:
            archives.bound()
            found.extend(archives.unpack(source, request["path"]))

        counts = files.inside(files.Place.of(request), work, before=lambda: _join(joins), result=lambda: found)
    answer({"ok": {"entries": counts[0], "skipped": counts[1]}})


def _get(request: dict, answer) -> None:
    """Pack a directory of the sandbox into an archive of the machine."""
    into = os.open(request["target"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    found: list[int] = []

    def work() -> None:
        archives.bound()
        found.extend(archives.pack(request["path"], into, request["limit"]))

    counts = files.inside(files.Place.of(request), work, result=lambda: found)
    answer({"ok": {"entries": counts[0], "skipped": counts[1]}})


def _join(joins: list[int]) -> None:
    for fd in joins:
        os.write(fd, b"0")


def _copy(request: dict, answer) -> None:
    """The workspace of the sandbox ``from`` into the one of the request."""
    source = files.Place(request["from"]["pid"], request["from"]["started"], None, files.WORKSPACE)
    copying.copy(source, files.Place.of(request), request["limit"], request["cgroups"])
    answer({"ok": {}})


def _snapshot(request: dict, answer) -> None:
    """What a sandbox wrote, into a folder (of an image's sandbox) or a file of the machine."""
    place = files.Place.of(request)
    if request["layer"]:
        snapshots.keep_layer(place, request["target"])
    else:
        snapshots.keep_records(place, request["target"], request["limit"])
    answer({"ok": {}})


def _try_disk(request: dict, answer) -> None:
    """Mount a disk where nobody sees it; it goes with this process."""
    mounts.own_mounts()
    mounts.mount_disk(request["disk"])
    answer({"ok": {}})


def _quiet(request: dict, answer) -> None:
    """End all that runs in the sandbox but its first process."""
    if request["pid"]:
        files.inside(files.Place.of(request), tree.kill_everything)
    else:
        tree.kill_marked(request["marker"])
    answer({"ok": {}})


def _kill(request: dict, answer) -> None:
    """End what a command that has ended left running."""
    if request["pid"]:
        kernel.enter(request["pid"], request["started"])
    tree.kill_tree(0, request["marker"], None)
    answer({"ok": {}})


def _listen(request: dict, answer) -> None:
    """A socket that listens on the sandbox's loopback; it stays there, whoever holds it."""
    if request["pid"]:
        kernel.enter(request["pid"], request["started"])
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", request["port"]))
        listener.listen(128)
        answer({"ok": {}}, [listener.fileno()])


HANDLERS = {
    "exec": _exec, "create": _create, "write": _write, "read": _read, "copy": _copy, "quiet": _quiet, "listen": _listen,
    "kill": _kill, "put": _put, "get": _get, "snapshot": _snapshot, "try_disk": _try_disk,
}  # fmt: skip


def _serve(connection: socket.socket, request: dict) -> None:
    def answer(value: dict, fds: list[int] | None = None) -> None:
        try:
            socket.send_fds(connection, [json.dumps({"id": request["id"], **value}).encode()], fds or [])
        except OSError:
            pass  # the service is gone; what was started is found by its records
        finally:
            connection.close()

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    try:
        HANDLERS[request["op"]](request, answer)
    except ProcessLookupError:
        answer({"error": ["sandbox_gone", f"sandbox {request['sandbox']!r} has ended"]})
    except (files.FileError, create.CreateError) as error:
        answer({"error": [getattr(error, "kind", "infra_error"), str(error)]})
    except OSError as error:
        answer({"error": ["infra_error", f"{request['op']} failed: {error}"]})
    except Exception as error:  # noqa: BLE001 - the service must hear of it instead of waiting
        answer({"error": ["infra_error", f"{request['op']} failed: {error!r}"]})


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    # Children are monitors that others wait for by pidfd; the kernel shall reap them, and what they leave behind,
    # so that it does not depend on the machine's first process.
    kernel.become_subreaper()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.disable()
    gc.freeze()
    while True:
        packet = connection.recv(PACKET)
        if not packet:
            return
        request = json.loads(packet)
        if os.fork() == 0:
            try:
                _serve(connection, request)
            finally:
                os._exit(0)
