"""The tokenizer and chat template of each run's policy, loaded once: the tiny policy's, or `transformers`' own.

Awaits: `renderer` is woken by the bucket's answer and by the thread that reads the model directory.
"""

import asyncio
from pathlib import Path

from opengyre.chat.open import open_renderer
from opengyre.proto import subjects
from opengyre.proto.run import RunSpec
from opengyre.rollout.prompt import Renderer
from opengyre.shared.bus import Bucket, Bus, RetryLater
from opengyre.tiny.config import ModelDirectoryError


class Models:
    """Renderers by run. A run's model directory never changes, so neither does its renderer."""

    def __init__(self, bus: Bus) -> None:
        self._runs = Bucket(bus, subjects.KV_RUNS, RunSpec)
        self._loaded: dict[str, Renderer] = {}
        self._loading = asyncio.Lock()

    async def renderer(self, run: str) -> Renderer:
        """Raises `RetryLater` when the run or its model directory is not there."""
        async with self._loading:
            if run in self._loaded:
                return self._loaded[run]
            found = await self._runs.get(run)
            if found is None:
                raise RetryLater(f"run {run} is not known yet", 1.0)
            directory = Path(found[0].model)
            try:
                loaded = await asyncio.to_thread(open_renderer, directory)
            except ModelDirectoryError as error:
                raise RetryLater(str(error), 5.0) from error
            self._loaded[run] = loaded
            return loaded
