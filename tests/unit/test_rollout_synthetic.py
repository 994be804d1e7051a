"""The synthetic agent: draws of the wanted distribution, the same for the same seeds; episodes without a sandbox."""

import math
import statistics

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.elastic.admission import seed_of
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.run import Harness, InvalidRunError, RunSpec, validate
from opengyre.proto.task import TaskSpec
from opengyre.proto.traj import Ended, Started, TakenOver, Verified
from opengyre.rollout.episode import AgentEnded, Effect, Episode, Phase, Released, advance
from opengyre.rollout.synthetic import lengths, total_tokens, verdict


def dispatch(group: int = 0, member: int = 0, **harness: object) -> EpisodeDispatch:
    return EpisodeDispatch(
        run="r", group=f"r-g{group:06d}", execution=f"r-g{group:06d}-e{member:02d}", members=(), version=0,
        seed=seed_of(7, group, member), group_seed=seed_of(7, group, -1), task=TaskSpec(task="t", instruction="load"),
        harness=Harness(agent="synthetic", **harness), min_members=1,  # type: ignore[arg-type]  # fields by keyword, checked at run time
    )  # fmt: skip


@given(st.integers(0, 500), st.integers(0, 8), st.integers(1, 30), st.floats(1, 5000), st.floats(0, 2), st.floats(0, 1))
def test_the_calls_of_an_execution_sum_to_its_draw(
    group: int, member: int, turns: int, mean: float, sigma: float, shared: float
) -> None:
    drawn = dispatch(
        group, member, synthetic_turns=turns, synthetic_tokens=mean, synthetic_sigma=sigma, synthetic_shared=shared
    )
    calls = lengths(drawn)
    assert len(calls) == turns
    assert min(calls) >= 1
    assert sum(calls) == total_tokens(drawn)
    # Who takes over, and where, changes nothing.
    assert lengths(msgspec.structs.replace(drawn, version=9)) == calls
    assert 0 <= verdict(drawn).value <= 1


def test_lengths_are_lognormal_with_a_part_of_the_variance_common_to_a_group() -> None:
    groups = [[total_tokens(dispatch(g, m, synthetic_tokens=10_000)) for m in range(8)] for g in range(400)]
    logs = [[math.log(tokens) for tokens in group] for group in groups]
    everything = [value for group in logs for value in group]
    assert math.isclose(statistics.mean(tokens for group in groups for tokens in group), 10_000, rel_tol=0.03)
    assert math.isclose(statistics.stdev(everything), 0.336, rel_tol=0.05)
    within = statistics.mean(statistics.variance(group) for group in logs)
    assert math.isclose(1 - within / statistics.variance(everything), 0.42, abs_tol=0.06)
    scores = [verdict(dispatch(g, m)).value for g in range(50) for m in range(8)]
    assert math.isclose(statistics.mean(scores), 0.5, abs_tol=0.05)
    assert statistics.stdev(scores) > 0.25


def test_the_reason_says_that_nothing_was_verified() -> None:
    assert verdict(dispatch()).output.startswith("synthetic")


def test_a_synthetic_episode_opens_and_releases_no_sandbox() -> None:
    state, place = Episode(), {"run": "r", "group": "g", "execution": "e", "index": 0, "attempt": 0}
    state, effects = advance(state, Started(dispatch=dispatch(), replica="a", **place))  # type: ignore[arg-type]  # fields by keyword, checked at run time
    assert (state.phase, effects) == (Phase.ACTING, (Effect.RUN_AGENT,))
    state, effects = advance(state, TakenOver(replica="b", **place))  # type: ignore[arg-type]  # fields by keyword, checked at run time
    assert (state.phase, effects) == (Phase.ACTING, (Effect.RUN_AGENT,))
    state, effects = advance(state, AgentEnded("done"))
    assert effects == (Effect.VERIFY,)
    state, effects = advance(state, Verified(parts=(verdict(dispatch()),), reason="done", **place))  # type: ignore[arg-type]  # fields by keyword, checked at run time
    ended = Ended(reason="done", turns=1, sampled_tokens=1, duration_s=1.0, members=(), **place)  # type: ignore[arg-type]  # fields by keyword, checked at run time
    state, effects = advance(state, ended)
    assert effects == (Effect.RELEASE,)
    assert state.sandbox is None
    assert advance(state, Released())[0].phase is Phase.OVER


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("synthetic_turns", 5, "1 to 4"),
        ("synthetic_tokens", 0, "1 to 10000000"),
        ("synthetic_sigma", -1, "0 to 4"),
        ("synthetic_shared", 1.5, "0 to 1"),
    ],
)
def test_a_load_out_of_its_range_is_refused_by_name(field: str, value: float, allowed: str) -> None:
    harness = Harness(agent="synthetic", **{field: value})  # type: ignore[arg-type]  # fields by keyword, checked at run time
    with pytest.raises(InvalidRunError, match=rf"harness\.{field} is {value}; allowed are values from {allowed}"):
        validate(RunSpec(run="r", model="m", harness=harness))
