"""What a long-lived loop waits for, told as it changes."""

import contextlib

from opengyre.shared.waits import Waits


class Standing:
    """One wait that stays open, with its age, for as long as its sentence is the same."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._what: str | None = None
        self._open = contextlib.ExitStack()

    def say(self, what: str | None) -> None:
        """Wait for this from now on; for nothing if None."""
        if what == self._what:
            return
        self._open.close()
        self._what = what
        if what is not None:
            self._open.enter_context(self._waits.on(what))

    def close(self) -> None:
        self.say(None)
