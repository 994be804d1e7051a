"""`gyre doctor`: what this machine has and lacks for OpenGyre, one line each, with a remedy.

A finding is `ok`, `warning` (something optional is missing) or `missing` (the stack cannot run, exit status 1).
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from opengyre.sandbox import doctor as sandbox_doctor
from opengyre.shared import embedded
from opengyre.shared.settings import load

DISK_MB = 2048
MEMORY_MB = 3072


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    status: Literal["ok", "warning", "missing"]
    detail: str
    remedy: str = ""


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Say what this machine lacks, one line each.

    Example: gyre doctor
    """
    found = findings(load().state_dir)
    if json:
        print(msgspec.json.encode(found).decode())
    else:
        console = Console(highlight=False)
        marks = {"ok": "[green]ok[/]     ", "warning": "[yellow]warning[/]", "missing": "[red]missing[/]"}
        for finding in found:
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            line = escape(f"{finding.name}: {finding.detail}{remedy}")
            console.print(f"{marks[finding.status]} {line}", soft_wrap=True)
    if any(finding.status == "missing" for finding in found):
        raise typer.Exit(1)


def findings(state_dir: Path) -> list[Finding]:
    """Everything that is looked at, in order."""
    return [
        _python(),
        _torch(),
        _binary("nats-server", embedded.nats_binary, "--version"),
        _binary("valkey-server", embedded.valkey_binary, "--version"),
        *_sandbox(),
        _disk(state_dir),
        _memory(),
        _docker(),
    ]


def _python() -> Finding:
    return Finding(name="python", status="ok", detail=platform.python_version())  # an older one cannot install us


def _torch() -> Finding:
    # Importing torch takes seconds; that it is installed is enough here.
    if importlib.util.find_spec("torch") is None:
        remedy = "pip install 'opengyre[trainer,host]'"
        return Finding(name="torch", status="missing", detail="not installed", remedy=remedy)
    return Finding(name="torch", status="ok", detail=importlib.metadata.version("torch"))


def _binary(name: str, find: Callable[[], str], flag: str) -> Finding:
    try:
        path = find()
    except embedded.MissingBinaryError as error:
        return Finding(name=name, status="missing", detail="not found", remedy=str(error))
    try:
        done = subprocess.run([path, flag], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(name=name, status="missing", detail=f"{path} does not run: {error}", remedy="install it anew")
    return Finding(name=name, status="ok", detail=f"{done.stdout.strip().splitlines()[0]} ({path})")


def _sandbox() -> list[Finding]:
    found: list[Finding] = []
    for one in sandbox_doctor.check():
        status = "missing" if not one.ok else "warning" if one.remedy else "ok"
        found.append(Finding(name=one.name, status=status, detail=one.message, remedy=one.remedy))
    return found


def _disk(state_dir: Path) -> Finding:
    place = state_dir.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free >> 20
    if not os.access(place, os.W_OK):
        return Finding(name="disk", status="missing", detail=f"{place} cannot be written", remedy="set state_dir")
    if free < DISK_MB:
        remedy = f"free some, or set state_dir to a place with {DISK_MB} MB"
        return Finding(name="disk", status="warning", detail=f"{free} MB free at {place}", remedy=remedy)
    return Finding(name="disk", status="ok", detail=f"{free} MB free at {place}")


def _memory() -> Finding:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) >> 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return Finding(name="memory", status="warning", detail="cannot be read on this system")
    detail = f"{available} MB available, {os.cpu_count()} processors"
    if available < MEMORY_MB:
        remedy = f"the embedded stack with two hosts takes about {MEMORY_MB} MB"
        return Finding(name="memory", status="warning", detail=detail, remedy=remedy)
    return Finding(name="memory", status="ok", detail=detail)


def _docker() -> Finding:
    path = shutil.which("docker")
    remedy = "needed only for compose.yaml"
    if path is None:
        return Finding(name="docker", status="warning", detail="not found (optional)", remedy=remedy)
    try:
        done = subprocess.run(
            [path, "version", "--format", "{{.Server.Version}}"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return Finding(name="docker", status="warning", detail="its daemon does not answer (optional)", remedy=remedy)
    return Finding(name="docker", status="ok", detail=done.stdout.strip())
