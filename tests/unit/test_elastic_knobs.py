"""The knobs of other systems: what they admit is what (phi, mu) admits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.elastic.admission import room
from opengyre.elastic.knobs import SYSTEMS, InvalidKnobError, reverse, system_of, translate
from opengyre.proto.decision import AdmissionInput
from opengyre.proto.run import Dispatch

BATCH = 32


def ours(phi: float, mu: int, published: int, started: int, trained: int) -> int:
    return room(
        AdmissionInput(
            dispatch=Dispatch(phi=phi, mu=mu, batch_groups=BATCH, group_size=1, min_members=1),
            updates=None,
            state="active",
            finished=False,
            published=published,
            kept_executions=started,
            unconsumed_executions=started - trained,
            waiting=1 << 20,
            most=1 << 20,
        )
    )


@given(st.integers(0, 8), st.integers(0, 20), st.integers(0, 400))
def test_areal_admits_what_phi_and_mu_1_admit(eta: int, version: int, ahead: int) -> None:
    made = translate("areal", {"max_head_offpolicyness": eta})
    trained = version * BATCH
    started = trained + ahead
    theirs = (eta + version + 1) * BATCH - started  # their capacity, of accepted and running ones
    assert ours(made.phi, made.mu, version, started, trained) == max(0, theirs)
    assert made.staleness == eta


@given(st.integers(0, 8), st.integers(1, 6), st.integers(0, 20))
def test_verl_admits_what_phi_and_mu_admit_at_a_synchronisation(eighths: int, mu: int, bursts: int) -> None:
    threshold = eighths / 8
    made = translate("verl", {"staleness_threshold": threshold, "trigger_parameter_sync_step": mu})
    trained = bursts * mu * BATCH
    for left_over in range(0, BATCH, 5):
        theirs = int(BATCH * (1 + threshold) * mu) - left_over
        assert ours(made.phi, made.mu, bursts * mu, trained + left_over, trained) == max(0, theirs)


@given(st.integers(0, 8))
def test_tinker_and_roll_start_so_many_batches_ahead(ahead: int) -> None:
    for system, knob in (("tinker", "sampling_steps_ahead"), ("roll", "async_generation_ratio")):
        made = translate(system, {knob: ahead})
        assert ours(made.phi, made.mu, 0, 0, 0) == BATCH * (ahead + 1)
    assert translate("roll", {"async_generation_ratio": ahead}).d_max == ahead


@given(st.integers(0, 8), st.integers(1, 6))
def test_trl_lets_the_deepest_setting_through_and_not_one_deeper(most: int, mu: int) -> None:
    made = translate("trl", {"max_staleness": most, "weight_sync_steps": mu})

    def lag(phi: float) -> int:
        """Versions that the last group of a boundary lags by at consumption, counted in synchronisations."""
        return (math.ceil(phi) + mu - 1) // mu

    assert lag(made.phi) == most
    assert lag(made.phi + 1) == most + 1
    assert not made.exact


@given(st.sampled_from(sorted(SYSTEMS)), st.integers(0, 32), st.integers(1, 8))
def test_there_and_back_is_the_same_or_says_what_is_not(system: str, halves: int, mu: int) -> None:
    phi = halves / 2
    made = reverse(system, phi, mu)
    assert translate(system, made.knobs).phi == made.phi
    assert made.staleness == made.phi + (made.mu - 1) / 2
    same = math.isclose(made.phi, phi) and made.mu == mu
    assert same or (not made.exact and "cannot be said" in made.notes[0])
    if system in ("areal", "roll", "tinker"):
        assert same == (mu == 1 and phi == int(phi))
        assert made.phi + made.mu <= phi + mu, "no more is admitted"
    if system == "trl":
        assert made.worst >= math.ceil(phi) + mu - 1, "nothing of it is dropped"


def test_known_settings() -> None:
    verl = translate("verl", {"staleness_threshold": 0.5, "trigger_parameter_sync_step": 4})
    assert (verl.phi, verl.mu, verl.staleness, verl.exact) == (2.0, 4, 3.5, True)
    assert reverse("verl", 0.5, 2).knobs == {"staleness_threshold": 0.25, "trigger_parameter_sync_step": 2}
    assert reverse("areal", 0.5, 2).knobs == {"max_head_offpolicyness": 1}
    trl = translate("trl", {"max_staleness": 4, "weight_sync_steps": 1})
    assert (trl.phi, trl.d_max, trl.on_stale) == (4, 4, "drop")


@pytest.mark.parametrize(
    ("system", "knobs", "sentence"),
    [
        ("nope", {}, "there is no system 'nope'; allowed: areal, verl, roll, trl, tinker"),
        ("areal", {}, "areal: max_head_offpolicyness is missing; allowed are whole values from 0 to 64"),
        ("areal", {"max_head_offpolicyness": -1}, "is -1; allowed are whole values from 0 to 64"),
        ("areal", {"max_head_offpolicyness": 0.5}, "is 0.5; allowed are whole values"),
        ("areal", {"max_head_offpolicyness": math.nan}, "is nan; allowed are whole values"),
        ("areal", {"eta": 1}, "areal has no knob eta; allowed: max_head_offpolicyness"),
        ("verl", {"staleness_threshold": 0.5, "trigger_parameter_sync_step": 0}, "step is 0; allowed are whole"),
    ],
)
def test_what_there_is_not_is_one_sentence(system: str, knobs: dict[str, float], sentence: str) -> None:
    with pytest.raises(InvalidKnobError) as caught:
        translate(system, knobs)
    assert sentence in str(caught.value)


def test_phi_and_mu_have_ranges() -> None:
    with pytest.raises(InvalidKnobError, match="phi is -1; allowed are values from 0 to 64"):
        reverse("areal", -1, 1)
    with pytest.raises(InvalidKnobError, match="mu is 0; allowed are whole values from 1 to 64"):
        reverse("areal", 0, 0)
    assert [knob.name for knob in system_of("trl").knobs] == ["max_staleness", "weight_sync_steps"]
