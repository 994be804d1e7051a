"""A small root directory for sandboxes, made of this machine's own programs."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="images need the right to mount")


def rootfs(path: Path) -> Path:
    """A small root: the machine's shell and tools with their libraries."""
    for name in ("bin", "lib", "lib64", "usr", "etc", "var", "root"):
        (path / name).mkdir(parents=True)
    tools = [
        "sh",
        "sleep",
        "cat",
        "ls",
        "rm",
        "mkdir",
        "id",
        "chown",
        "chmod",
        "ln",
        "mv",
        "touch",
        "dd",
        "stat",
        "env",
        "mknod",
        "mount",
        "mkfifo",
    ]
    wanted = {shutil.which(tool) for tool in tools}
    libraries: set[str] = set()
    for tool in filter(None, wanted):
        shutil.copy2(tool, path / "bin" / Path(tool).name)
        listed = subprocess.run(["ldd", tool], capture_output=True, text=True, timeout=10, check=False).stdout
        libraries |= {word for word in listed.split() if word.startswith("/")}
    for library in libraries:
        target = path / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, target)
    (path / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nworker:x:1234:1234::/home/worker:/bin/sh\n")
    (path / "etc/base").write_text("of the image\n")
    (path / "var/kept").mkdir()
    (path / "var/kept/one").write_text("1")
    (path / "var/gone").write_text("x")
    return path
