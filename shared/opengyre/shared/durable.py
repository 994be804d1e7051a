"""What has to be there after a crash."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Have the content of a file, or the entries of a folder, on the disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
