"""Lives of a trainer, each a process that is forked from one that has imported everything: a life begins at once.

As a program it forks a trainer for each line on its standard input, and writes the process id of it.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

TESTS = Path(__file__).resolve().parents[1]


class Lives:
    """The program, and one trainer at a time."""

    def __init__(self, python: str, url: str, state: Path, log: Path) -> None:
        self._command = [python, "-m", "support.trainer_lives", str(log)]
        self._env: Mapping[str, str] = {
            **os.environ, "GYRE_BUS__URL": url, "GYRE_STATE_DIR": str(state), "OMP_NUM_THREADS": "1"
        }  # fmt: skip
        self._pid: int | None = None

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self._command, cwd=TESTS, env=self._env, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        return self

    async def begin(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"begin\n")
        self._pid = int(await asyncio.wait_for(self._process.stdout.readline(), 60))

    def kill(self) -> None:
        """kill -9."""
        assert self._pid is not None
        os.kill(self._pid, signal.SIGKILL)
        self._pid = None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ):
        if self._pid is not None:
            os.kill(self._pid, signal.SIGTERM)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 60)
        except TimeoutError:
            self._process.kill()
            raise


def main(log: str) -> None:
    """Fork for each line; at the end, wait for the last one."""
    import opengyre.trainer.service  # that a life has nothing to import
    from opengyre.shared.lifecycle import main as serve

    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for descriptor in (1, 2):
                os.dup2(out, descriptor)
            sys.argv = ["trainer"]
            try:
                serve("trainer", f"{opengyre.trainer.service.__name__}:Trainer")
            finally:
                os._exit(1)
        print(child, flush=True)
        while os.waitpid(-1, os.WNOHANG)[0] > 0:
            pass
    os.wait()


if __name__ == "__main__":
    main(sys.argv[1])
