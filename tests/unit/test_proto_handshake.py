"""Which engines a run takes: one line a setting that moves log-probs."""

import msgspec
import pytest

from opengyre.proto.handshake import differs, refusal
from opengyre.proto.host import HostState, HostStatus, Sampler
from opengyre.proto.run import Harness, RunSpec, Serving

FINE = Sampler(dtype="bfloat16", kv_dtype="bfloat16", chunked_prefill=True, prefix_caching=True)
WHOLE = "since the trainer's log-probs are of the whole distribution"

REFUSED = [
    (
        {"temperature": 0.5},
        {},
        "samples at temperature 0.5, whatever a call says; allowed is the call's own, or 1 (harness.temperature)",
    ),
    ({"top_p": 0.9}, {}, f"samples with top_p 0.9; allowed is 1, {WHOLE}"),
    ({"top_k": 50}, {}, f"samples with top_k 50; allowed is 0, {WHOLE}"),
    ({"min_p": 0.05}, {}, f"samples with min_p 0.05; allowed is 0, {WHOLE}"),
    ({"repetition_penalty": 1.1}, {}, f"samples with repetition_penalty 1.1; allowed is 1, {WHOLE}"),
    ({"processors": ("bias",)}, {}, f"changes logits by bias; allowed is nothing, {WHOLE}"),
    ({"logprobs": "raw_logits"}, {}, "log-probs are raw_logits; allowed are processed ones"),
    ({}, {"dtype": "float32"}, "computes in bfloat16; allowed is float32 (serving.dtype)"),
    ({"kv_dtype": "fp8"}, {}, "keeps keys and values in fp8; allowed is bfloat16 (serving.kv_dtype)"),
    ({}, {"kv_dtype": "fp8"}, "keeps keys and values in bfloat16; allowed is fp8 (serving.kv_dtype)"),
    ({"quantization": "awq"}, {}, "quantization of weights is awq; allowed is none (serving.quantization)"),
    ({}, {"quantization": "awq"}, "quantization of weights is none; allowed is awq (serving.quantization)"),
    ({}, {"chunked_prefill": False}, "chunked_prefill is on; allowed is off (serving.chunked_prefill)"),
    (
        {"prefix_caching": False},
        {"prefix_caching": True},
        "prefix_caching is off; allowed is on (serving.prefix_caching)",
    ),
]


def spec(temperature: float = 1.0, **serving) -> RunSpec:
    return RunSpec(run="r", model="m", harness=Harness(temperature=temperature), serving=Serving(**serving))


@pytest.mark.parametrize(("does", "wished", "sentence"), REFUSED)
def test_an_engine_that_does_otherwise_is_refused_by_name(does: dict, wished: dict, sentence: str) -> None:
    said = differs(spec(**wished), msgspec.structs.replace(FINE, **does))
    assert said in (f"its engine {sentence}", f"its engine's {sentence}")


def test_each_setting_of_an_engine_is_looked_at() -> None:
    assert {name for does, _, _ in REFUSED for name in does} | {"dtype", "chunked_prefill"} == set(
        Sampler.__struct_fields__
    )
    assert {name for _, wished, _ in REFUSED for name in wished} == set(Serving.__struct_fields__)


def test_an_engine_that_does_as_the_run_says_is_taken() -> None:
    same = {"dtype": "bfloat16", "kv_dtype": "bfloat16", "chunked_prefill": True, "prefix_caching": True}
    for wished in ({}, same):
        assert differs(spec(**wished), FINE) is None
        assert differs(spec(0.7, **wished), msgspec.structs.replace(FINE, temperature=0.7)) is None
    assert differs(spec(kv_dtype="fp8"), msgspec.structs.replace(FINE, kv_dtype="fp8")) is None


def test_raw_log_probs_are_those_of_the_distribution_at_temperature_1_only() -> None:
    raw = msgspec.structs.replace(FINE, logprobs="raw")
    assert differs(spec(1.0), raw) is None
    assert differs(spec(0.7), raw) == (
        "its engine's log-probs are raw; allowed are processed ones, since harness.temperature is 0.7"
    )


def test_an_engine_that_has_not_begun_is_not_judged_and_one_that_serves_has_to_say() -> None:
    def status(state: HostState, sampler: Sampler | None = None) -> HostStatus:
        return HostStatus(host="h", cell="h", boot="b", state=state, epoch=0, url="u", engine="vllm", sampler=sampler)

    assert refusal(spec(), status(HostState.TRAIN)) is None
    assert "does not say how it samples" in str(refusal(spec(), status(HostState.ROLLOUT)))
    assert refusal(spec(), status(HostState.ROLLOUT, FINE)) is None
    assert "top_k 1" in str(refusal(spec(), status(HostState.TRAIN, msgspec.structs.replace(FINE, top_k=1))))
