"""The image ``host``: the node's own system folders, where no image of a task's base is at hand.

Its root is a skeleton of small files and empty folders, all of it writable in a sandbox; the programs (``/usr``) are
the node's own, shown read-only. Nothing of the node's homes, settings, state or other users is in it.
"""

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from opengyre.sandbox.images import Image, Images
from opengyre.sandbox.origin import HOST

_FOLDERS = (
    "boot", "dev", "etc", "home", "logs", "media", "mnt", "opt", "proc", "root", "run", "srv", "sys", "tests", "tmp",
    "usr", "var", "var/cache", "var/lib", "var/lib/apt/lists", "var/log", "var/tmp", "workspace",
)  # fmt: skip
_OPEN = ("tmp", "var/tmp")
_TOP = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = (
    "ld.so.cache",
    "ld.so.conf",
    "localtime",
    "bash.bashrc",
    "profile",
    "debian_version",
    "os-release",
    "mime.types",
)
_ETC_FOLDERS = ("alternatives", "ssl/certs", "ld.so.conf.d", "python3.11", "python3")
_ETC_FILES = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nagent:x:1000:1000:agent:/workspace:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


def ensure(images: Images) -> None:
    """Make the image where it is not there. Blocks."""
    if HOST in images.names():
        return
    with tempfile.TemporaryDirectory(prefix="gyre-host-") as folder:
        root = Path(folder) / "root"
        root.mkdir(mode=0o755)
        shown = _fill(root)
        images.add_layers(HOST, [root], Image(size=0, binds=shown))


def _fill(root: Path) -> dict[str, str]:
    """The skeleton; the folders that are shown over it."""
    for name in _FOLDERS:
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name).chmod(0o1777 if name in _OPEN else 0o755)
    (root / "root").chmod(0o700)
    shown = {"/usr": "/usr"}
    for name in _TOP:
        top = Path("/", name)
        if top.is_symlink():
            (root / name).symlink_to(top.readlink())
        elif top.is_dir():
            (root / name).mkdir()
            shown[str(top)] = str(top)
    for name, text in _ETC_FILES.items():
        (root / "etc" / name).write_text(text)
    for name in _ETC:
        with suppress(FileNotFoundError):
            shutil.copyfile(Path("/etc", name), root / "etc" / name, follow_symlinks=name != "localtime")
    for name in _ETC_FOLDERS:
        with suppress(FileNotFoundError, NotADirectoryError):
            shutil.copytree(Path("/etc", name), root / "etc" / name, symlinks=True)
    return shown
