"""The command `gyre` in tests, told where the bus and the state are."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from opengyre.cli.main import app
from opengyre.cli.stack import StackError


class Gyre:
    """The command, told where the bus is."""

    def __init__(self, url: str, state: Path) -> None:
        self.url = url
        self.state = state

    async def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit status, stdout, stderr; in a thread of this process."""
        environment = {"GYRE_BUS__URL": self.url, "GYRE_STATE_DIR": str(self.state)}
        done = await asyncio.to_thread(CliRunner(env=environment).invoke, app, list(arguments))
        if isinstance(done.exception, StackError):
            return 1, done.stdout, f"gyre: {done.exception}\n"
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, done.stdout, done.stderr

    async def program(self, *arguments: str) -> tuple[int, str, str]:
        """The same, by a process of its own."""
        command = [sys.executable, "-m", "opengyre.cli", *arguments]
        environment = {**os.environ, "GYRE_BUS__URL": self.url, "GYRE_STATE_DIR": str(self.state)}
        done = await asyncio.to_thread(
            subprocess.run,
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=150,
            stdin=subprocess.DEVNULL,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout, done.stderr
