"""Removing folders of sandboxes that are gone."""

import shutil
import time
from pathlib import Path

PAUSES_S = (0.0, 0.01, 0.05, 0.25)


def discard(folder: Path) -> None:
    """Remove a folder that nobody looks for any more; blocks for a third of a second at most.

    Who watched a command that ends just now may still write its end into it, once: so it is tried again for a moment.
    What is left even then the next start removes.
    """
    for pause_s in PAUSES_S:
        time.sleep(pause_s)
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
