"""Brokers as deploy/kubernetes configures them: three on loopback, or one, with the users of every service."""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from opengyre.shared import embedded
from opengyre.shared.bus.rights import RIGHTS

BASE = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes" / "base" / "nats"
USERS = ("bootstrap", *RIGHTS)
READY_S = 90.0


class Brokers:
    """Three servers that have found each other; `url(user)` names all of them, as the Secret of a service does."""

    def __init__(self, folder: Path, held: Sequence[socket.socket]) -> None:
        """`held`: of the ports that they listen on, nine."""
        self.folder = folder
        self.passwords = {name: f"p{secrets.token_hex(8)}" for name in (*USERS, "route")}
        numbers = [one.getsockname()[1] for one in held]
        self.ports = {name: numbers[first::3] for first, name in enumerate(("client", "http", "route"))}
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def url(self, user: str) -> str:
        return ",".join(f"nats://{user}:{self.passwords[user]}@127.0.0.1:{port}" for port in self.ports["client"])

    def configuration(self, number: int) -> str:
        """That of the cluster, with other addresses and another directory."""
        text = (BASE / "nats.conf").read_text(encoding="utf-8")
        changes = {
            "0.0.0.0:4222": f"127.0.0.1:{self.ports['client'][number]}",
            "0.0.0.0:8222": f"127.0.0.1:{self.ports['http'][number]}",
            "0.0.0.0:6222": f"127.0.0.1:{self.ports['route'][number]}",
            "/var/lib/opengyre/nats": str(self.folder / f"store{number}"),
        }
        for before, after in changes.items():
            assert before in text, before
            text = text.replace(before, after)
        return text

    def start(self, number: int) -> None:
        path = self.folder / f"nats{number}.conf"
        path.write_text(self.configuration(number), encoding="utf-8")
        env = {**os.environ, "POD_NAME": f"nats-{number}"}
        env |= {f"BUS_{name.upper()}": password for name, password in self.passwords.items()}
        routes = (f"nats://route:{self.passwords['route']}@127.0.0.1:{port}" for port in self.ports["route"])
        env["BUS_ROUTES"] = f"[{', '.join(routes)}]"
        with self.log(number).open("ab") as out:
            command = [embedded.nats_binary(), "-c", path.name]
            self.processes[number] = subprocess.Popen(command, cwd=self.folder, env=env, stdout=out, stderr=out)

    def log(self, number: int) -> Path:
        return self.folder / f"nats{number}.log"

    def wait(self, number: int) -> None:
        """Until its own health check, which the probes ask, is content."""
        url = f"http://127.0.0.1:{self.ports['http'][number]}/healthz?js-server-only=true"
        deadline = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
            assert self.processes[number].poll() is None, self.log(number).read_text(errors="replace")[-2000:]
            assert time.monotonic() < deadline, self.log(number).read_text(errors="replace")[-2000:]
            time.sleep(0.05)

    def kill(self, number: int) -> None:
        self.processes[number].kill()
        self.processes[number].wait(60)

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(60)

    def violations(self) -> set[str]:
        """What somebody tried and was refused."""
        found: set[str] = set()
        for number in self.processes:
            for line in self.log(number).read_text(errors="replace").splitlines():
                if "Violation" in line or "authentication error" in line.lower():
                    found.add(line.partition(" - ")[2] or line)
        return found


@contextlib.contextmanager
def brokers(folder: Path) -> Iterator[Brokers]:
    folder.mkdir(parents=True, exist_ok=True)
    # Once: a broker that reads it while it is written anew for the next one finds it empty, and lets everybody do all.
    shutil.copy(BASE / "users.conf", folder)
    with contextlib.ExitStack() as held:
        made = Brokers(folder, [held.enter_context(embedded.hold_port()) for _ in range(9)])
        held.callback(made.end)
        for number in range(3):
            made.start(number)
        for number in range(3):
            made.wait(number)
        yield made
