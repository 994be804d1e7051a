"""A host whose engine samples otherwise than the run trains: it gets no calls, and the status says why."""

from pathlib import Path

from opengyre.proto.host import HostState, Sampler
from support import eventually
from support.gateway_cli import gyre_on
from support.processes import process
from support.rollout_fakes import Stack, dispatch

SCRIPT = ["echo one > a.txt", "cat b.txt", "done"]
WHY = (
    "cell h1 is refused: h1 does not serve run r: its engine samples at temperature 0.5, whatever a call says; allowed "
    "is the call's own, or 1 (harness.temperature)"
)


async def test_a_host_at_another_temperature_gets_no_calls_until_it_samples_as_the_run_trains(
    stack: Stack, tmp_path: Path
) -> None:
    fine, cold = stack.host("h0", SCRIPT), stack.host("h1", SCRIPT)
    cold.sampler = Sampler(temperature=0.5)
    episodes = [dispatch(number=number, member=member) for number in range(3) for member in range(2)]
    folder = tmp_path / "gateway"
    folder.mkdir()
    with process(stack, "allocator", ALLOCATOR__TICK_S="0.05"):
        async with cold.up(), fine.up(), stack.service(), gyre_on(stack.bus, folder) as gyre:

            async def held() -> list[str]:
                return (await gyre.json("status", code=1))["held"]

            async def refused() -> bool:
                return WHY in await held()

            await eventually(refused, 60)
            assert WHY in await gyre.shown("status", code=1)
            report = await gyre.json("hosts")
            assert {cell["cell"]: cell["state"] for cell in report["cells"]} == {"h0": "rollout", "h1": "refused"}
            assert "refused" in await gyre.shown("hosts")
            for episode in episodes[:-1]:
                await stack.submit(episode)
            for episode in episodes[:-1]:
                await eventually(lambda episode=episode: stack.ended(episode))
            assert (len(fine.requests), cold.requests) == (len(SCRIPT) * len(episodes[:-1]), [])

            # At temperature 1 raw log-probs are the same: it serves, now that it samples at each call's own.
            cold.sampler = Sampler(logprobs="raw")
            await cold.become(HostState.ROLLOUT)
            await fine.become(HostState.CORDONED)
            await stack.submit(episodes[-1])
            await eventually(lambda: stack.ended(episodes[-1]))
            assert len(cold.requests) == len(SCRIPT)

            async def taken() -> bool:
                return not any("refused" in sentence for sentence in await held())

            await eventually(taken)
