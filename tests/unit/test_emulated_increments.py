"""What is seen of a call in the emulated engine while it runs."""

import asyncio
from typing import Any

from opengyre.host.emulated import EmulatedEngine, _Weights
from opengyre.shared.settings import HostSettings
from opengyre.tiny.state import EngineState
from opengyre.tiny.types import GenerateRequest


async def test_increments_of_an_emulated_call_are_its_beginning() -> None:
    """Also when the weights change under way: what was said of a token's version stays true."""
    engine = EmulatedEngine(HostSettings(engine="emulated", tokens_per_s=100, capacity=2))
    made: Any = engine
    made._use(_Weights(300, 1), 4)
    made._state = EngineState.PAUSED
    await engine.resume()
    answer = engine.submit(GenerateRequest("a", (20, 21), 200, seed=7))
    tokens: list[int] = []
    versions: list[int] = []
    while not answer.done():
        await asyncio.sleep(0.01)
        new = engine.sampled("a", len(tokens))
        tokens += new.token_ids
        versions += [span.version for span in new.weight_versions for _ in range(span.start, span.end)]
        if len(tokens) > 20 and made._versions[-1][1] == 4:
            made._use(_Weights(300, 1), 5)
    result = await answer
    assert len(tokens) > 20
    assert list(result.token_ids[: len(tokens)]) == tokens
    covered = [span.version for span in result.weight_versions for _ in range(span.start, span.end)]
    assert covered[: len(versions)] == versions
    assert set(covered) == {4, 5}
    assert engine.sampled("a", 0).token_ids == ()
    await engine.close()
