"""Where a stack lives: its directory, its lock, and `stack.json`, which tells others how to reach it.

Invariants: whoever holds the lock owns the directory, and the lock goes with its process, however that ends;
`stack.json` is complete or absent (temporary name, rename) and readable by its user alone; it outlives the stack, so
that a later one gets the same ports and key, and then names no process.
"""

import contextlib
import fcntl
import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import msgspec

from opengyre.cli.supervisor_plan import MARK
from opengyre.shared.settings import Settings, SettingsError, state_dir

FILE = "stack.json"


class StackError(Exception):
    """The stack cannot do what was asked; one sentence."""


def directory(given: Path | None) -> Path:
    """The stack's directory, absolute: `given`, or that of setting state_dir, whatever else the settings say.

    Where they cannot even be read, the stack that runs in the default directory is the one. Raises `SettingsError`.
    """
    if given is not None:
        return given.absolute()
    try:
        return state_dir().absolute()
    except SettingsError as error:
        default = Path(Settings.model_fields["state_dir"].default).absolute()
        if owner(default) is not None:
            return default
        raise SettingsError(f"{error}; --state-dir names the stack's directory without it") from error


def absent(state_dir: Path, option: str) -> str:
    """What a verb says that finds no stack; `option` names another."""
    return f"there is no stack in {state_dir}; `gyre up` starts one, or name another with {option}"


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `stack.json`."""

    nats: str
    """URL."""
    valkey: str | None
    """URL; none when a cache is neither embedded nor set."""
    gateway: str
    """Base URL of the REST API."""
    api_key: str | None
    """What the gateway asks for."""
    supervisor_pid: int = 0
    """0 after the stack was stopped."""
    state_dir: str
    """Absolute."""
    cells: int = 0
    host: dict[str, Any] | None = None
    """The settings that its hosts were started with, which are alike but for names and counts."""
    processes: dict[str, int] = {}
    """Name -> process id, of those that run."""
    ready: bool = False
    missing: dict[str, str] = {}
    """Name -> what it lacks."""


def read(state_dir: Path) -> Stack | None:
    """The stack that was last started in `state_dir`; None if there was none. Raises `StackError` on damage."""
    path = state_dir / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Stack)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StackError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise StackError(f"{path} is damaged ({error}); remove it, and the next `gyre up` takes new ports") from error


def running(state_dir: Path) -> Stack | None:
    """The stack that runs in `state_dir`; None if there is none, or it has hardly begun to. Raises `StackError`."""
    pid = owner(state_dir)
    there = None if pid is None else read(state_dir)
    return there if there is not None and there.supervisor_pid == pid else None


def write(state_dir: Path, stack: Stack) -> None:
    """Replace `stack.json` as a whole."""
    handle, name = tempfile.mkstemp(dir=state_dir, prefix=f".{FILE}.")  # mkstemp gives mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(stack), indent=2) + b"\n")
        Path(name).replace(state_dir / FILE)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def new_key() -> str:
    """A key for the gateway."""
    return f"gyre_{secrets.token_urlsafe(24)}"


ASKING_S = 0.5
"""How long `owner`, which asks whether anybody holds a state directory, may itself seem to hold it, and how long it
waits for whoever holds it to say so.
"""


class Lock:
    """The exclusive right to a state directory. Use as `with Lock(directory)`; raises `StackError` when it is taken."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "lock"
        self._handle: int | None = None

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StackError(_unusable_sentence(self._path.parent, error)) from error
        until = time.monotonic() + ASKING_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= until:
                    os.close(handle)
                    raise StackError(_running_sentence(self._path.parent)) from error
                time.sleep(0.02)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        self._handle = handle
        return self

    def __exit__(self, *exc: object) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def owner(state_dir: Path) -> int | None:
    """The process that holds the lock of `state_dir`; None if nobody does. Raises `StackError`."""
    try:
        handle = os.open(state_dir / "lock", os.O_RDWR)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StackError(_unusable_sentence(state_dir, error)) from error
    until = time.monotonic() + ASKING_S
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                # Who has only just taken it has not written its id yet: what is there is a former owner's, or nothing.
                pid = _written(handle)
                if pid is not None and _has_open(pid, handle):
                    return pid
            else:
                return None
            if time.monotonic() >= until:
                return None
            time.sleep(0.02)
    finally:
        os.close(handle)


def _written(handle: int) -> int | None:
    with contextlib.suppress(ValueError):
        return int(os.pread(handle, 32, 0))
    return None


def _has_open(pid: int, handle: int) -> bool:
    """Whether a process has the file of `handle` open; True where it may not be looked at."""
    wanted = os.fstat(handle)
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except PermissionError:
        return True
    except OSError:
        return False
    for link in links:
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.path.samestat(link.stat(), wanted):
                return True
    return False


def _unusable_sentence(state_dir: Path, error: OSError) -> str:
    return f"state directory {state_dir} cannot be used ({error.strerror}); name another with --state-dir"


def _running_sentence(state_dir: Path) -> str:
    there: Stack | None = None
    with contextlib.suppress(StackError):
        there = read(state_dir)
    where = f" at {there.gateway}" if there is not None and there.supervisor_pid else ""
    return f"a stack runs already in {state_dir}{where}; `gyre down --state-dir {state_dir}` stops it"


def belongs(pid: int, state_dir: Path) -> bool:
    """Whether the process was started by a supervisor of `state_dir`: a process id alone may be another's by now."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{MARK}={state_dir.absolute()}".encode() in environment
