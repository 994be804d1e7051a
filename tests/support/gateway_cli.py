"""The verbs of `gyre` against a gateway in this process."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from opengyre.cli import stack as stacks
from opengyre.cli.main import app
from opengyre.cli.stack import Stack, StackError
from opengyre.shared.bus import Bus
from support.gateway_fakes import Running, gateway_on

KEY = "gyre_test"


class Gyre:
    """Runs verbs in a thread, so that the gateway in this loop can answer them."""

    def __init__(self, running: Running, state: Path) -> None:
        self.running = running
        self.state = state

    async def run(self, *arguments: str) -> Result:
        return await self._invoke(*arguments, "--state-dir", str(self.state))

    async def _invoke(self, *words: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, app, list(words))

    async def shown(self, *arguments: str, code: int = 0) -> str:
        result = await self.run(*arguments)
        assert result.exit_code == code, (result.output, result.exception)
        return result.stdout

    async def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(await self.shown(*arguments, "--json", code=code))

    async def lines(self, *arguments: str) -> list[Any]:
        return [json.loads(line) for line in (await self.shown(*arguments, "--json")).splitlines()]

    async def refused(self, *arguments: str) -> str:
        return _sentence(await self.run(*arguments))

    async def plain(self, *arguments: str) -> Any:
        """The JSON of a verb that needs no stack."""
        result = await self._invoke(*arguments, "--json")
        assert result.exit_code == 0, (result.output, result.exception)
        return json.loads(result.stdout)

    async def run_plain(self, *arguments: str) -> str:
        """What a verb that needs no stack shows."""
        result = await self._invoke(*arguments)
        assert result.exit_code == 0, (result.output, result.exception)
        return result.stdout

    async def refused_plain(self, *arguments: str) -> str:
        """The sentence of a verb that needs no stack."""
        return _sentence(await self._invoke(*arguments))


def _sentence(result: Result) -> str:
    assert isinstance(result.exception, StackError), (result.output, result.exception)
    sentence = str(result.exception)
    assert "\n" not in sentence
    return sentence


@contextlib.asynccontextmanager
async def gyre_on(bus: Bus, folder: Path) -> AsyncIterator[Gyre]:
    """A gateway on `bus` and the verbs that find it through the state directory."""
    state = folder / "state"
    state.mkdir()
    async with gateway_on(bus, folder, api_keys=(KEY,)) as running:
        running.client.headers["X-API-Key"] = KEY
        stacks.write(state, Stack(nats=bus.url, valkey=None, gateway=running.url, api_key=KEY, state_dir=str(state)))
        yield Gyre(running, state)
