"""vLLM's page of metrics: what is read of it, what of the last seconds is believed, and for how long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.host.vllm_metrics import RATE_S, Figures, Meter, read_figures

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 2.0
vllm:num_requests_running{engine="1",model_name="policy"} 3.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 7.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="capacity"} 6.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="deferred"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.95
vllm:kv_cache_usage_perc{engine="1",model_name="policy"} 0.5
vllm:generation_tokens_total{engine="0",model_name="policy"} 1200.0
vllm:generation_tokens_total{engine="1",model_name="policy"} 300.0
vllm:generation_tokens_created{engine="0",model_name="policy"} 1.764e+09
vllm:prefix_cache_queries_total{engine="0",model_name="policy"} 4000.0
vllm:prefix_cache_hits_total{engine="0",model_name="policy"} 3000.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="policy"} 9.0
vllm:num_preemptions_total{engine="0",model_name="policy"} 4.0
vllm:request_generation_tokens_sum{engine="0",model_name="policy"} 99.0
process_cpu_seconds_total 12.5
vllm:odd x
"""


def test_a_page_says_what_all_its_engines_do() -> None:
    assert read_figures(PAGE) == Figures(
        running=5, waiting=7, kv_usage=0.95, generated=1500, queried=4000, hits=3000, preemptions=4
    )
    assert read_figures("") == Figures()


def test_the_fullest_engine_says_how_full_the_memory_is() -> None:
    """Shares of two engines were added up before: half full twice was full."""
    assert read_figures(PAGE.replace("0.95", "0.5")).kv_usage == 0.5


def test_rates_are_of_the_last_seconds() -> None:
    meter = Meter()
    for second in range(10):
        meter.take(Figures(generated=50.0 * second**2, queried=100.0 * second, hits=25.0 * second), float(second))
    # From 6 to 9 seconds: 50 * (81 - 36) tokens.
    assert meter.tokens_per_s(9.0) == pytest.approx(50 * 45 / 3)
    assert meter.prefix_hits(9.0) == pytest.approx(0.25)


def test_what_was_read_long_ago_says_nothing_of_now() -> None:
    meter = Meter()
    assert meter.now(0.0) is None
    meter.take(Figures(running=3), 1.0)
    assert meter.now(1.0) == Figures(running=3)
    assert meter.tokens_per_s(1.0) is None
    meter.take(Figures(running=4, generated=10), 2.0)
    assert meter.tokens_per_s(2.0) == 10
    late = 2.0 + RATE_S + 0.1
    assert (meter.now(late), meter.tokens_per_s(late), meter.prefix_hits(late)) == (None, None, None)


def test_a_server_that_was_started_again_begins_anew() -> None:
    meter = Meter()
    meter.take(Figures(generated=1000, queried=10, hits=5), 1.0)
    meter.take(Figures(generated=20, queried=2, hits=2), 2.0)
    assert meter.tokens_per_s(2.0) is None
    meter.take(Figures(generated=30, queried=6, hits=4), 3.0)
    assert meter.tokens_per_s(3.0) == 10
    assert meter.prefix_hits(3.0) == 0.5


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.floats(0.1, 2.0)), min_size=2, max_size=20))
def test_rates_are_those_of_some_of_the_readings(steps: list[tuple[int, int, float]]) -> None:
    """Law: a rate lies between the least and the greatest of its steps', and hits are a share."""
    meter, now, generated, queried, hits = Meter(), 0.0, 0, 0, 0
    rates = []
    meter.take(Figures(), now)
    for tokens, found, seconds in steps:
        now, generated, queried, hits = now + seconds, generated + tokens, queried + 50, hits + found
        rates.append(tokens / seconds)
        meter.take(Figures(generated=generated, queried=queried, hits=hits), now)
    rate, share = meter.tokens_per_s(now), meter.prefix_hits(now)
    assert rate is not None
    assert min(rates) - 1e-9 <= rate <= max(rates) + 1e-9
    assert share is not None
    assert 0 <= share <= 1
