"""The folder of offline stand-ins on a node: programs, and the Python modules that tests usually fetch.

It is named by its content, there whole or not at all, and shared by the services of a machine: it lies where a user
without rights can reach it, as sandboxes are started by one. Sandboxes show it read-only.
"""

import hashlib
import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path

from opengyre.sandbox.machine import RUN
from opengyre.tasks.shims import FOLDER, SHIMS, SITE, SITE_FOLDER

TOOLS = ("pytest", "pluggy", "iniconfig", "packaging", "pygments", "pytest-json-ctrf")


def make(parent: Path) -> tuple[Path, list[str]]:
    """The folder, made below ``parent`` where it is not there; names of the tools that are not there. Blocks."""
    versions = {name: _version(name) for name in TOOLS}
    content = repr((sorted(SHIMS.items()), sorted(SITE.items()), sorted(versions.items())))
    folder = parent / f"offline-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    missing = [name for name, version in versions.items() if version is None]
    if folder.is_dir():
        return folder, missing
    parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=".offline-", dir=parent))
    try:
        beside.chmod(0o755)
        shims = beside / FOLDER
        shims.mkdir(mode=0o755)
        for name, text in SHIMS.items():
            (shims / name).write_text(text)
            (shims / name).chmod(0o755)
        (beside / SITE_FOLDER).mkdir(mode=0o755)
        for name, text in SITE.items():
            (beside / SITE_FOLDER / name).write_text(text)
            (beside / SITE_FOLDER / name).chmod(0o644)
        tools = beside / "tools"
        tools.mkdir(mode=0o755)
        for name in TOOLS:
            _copy(name, tools)
        beside.rename(folder)
    except OSError:
        shutil.rmtree(beside, ignore_errors=True)
        if not folder.is_dir():  # else another service was first
            raise
    return folder, missing


def place(state: Path) -> Path:
    """Where it is made: for all to reach where this process is root, else with the service's state."""
    return RUN if os.geteuid() == 0 else state


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _copy(name: str, into: Path) -> None:
    """The modules of an installed distribution, with what says that it is installed; nothing where it is not."""
    if _version(name) is None:
        return
    for file in importlib.metadata.files(name) or ():
        if file.parts[0] in ("..", "/") or file.suffix in (".pyc", ".so") or "__pycache__" in file.parts:
            continue
        source = Path(os.fspath(file.locate()))
        if not source.is_file():
            continue
        target = into / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
