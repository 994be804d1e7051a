"""What a run may say of the formats that its engines use, and the sentence that a name gets which no engine has."""

import re
from typing import Any

import pytest

from opengyre.gateway.models import RunIn
from opengyre.gateway.problems import Problem
from opengyre.proto.engine_names import KV_DTYPES, QUANTIZATIONS
from opengyre.proto.run import InvalidRunError, RunSpec, Serving, validate

KV = "allowed are float32, float16, bfloat16, fp8, "
METHODS = "allowed are awq, auto_awq, fp8, "


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"dtype": "bfloat16", "kv_dtype": "fp8_e4m3", "quantization": "compressed-tensors"},
        *({"kv_dtype": name} for name in KV_DTYPES),
        *({"quantization": name} for name in QUANTIZATIONS),
    ],
)
def test_names_of_engines_are_taken(given: dict[str, Any]) -> None:
    spec = RunSpec(run="r", model="m", serving=Serving(**given))
    assert validate(spec) is spec


@pytest.mark.parametrize(
    ("given", "said", "end"),
    [
        ({"kv_dtype": "fp8_e4m4"}, f"serving.kv_dtype is 'fp8_e4m4'; {KV}", "that which the engine computes in"),
        ({"kv_dtype": "FP8"}, f"serving.kv_dtype is 'FP8'; {KV}", "that which the engine computes in"),
        ({"kv_dtype": "auto"}, f"serving.kv_dtype is 'auto'; {KV}", "that which the engine computes in"),
        ({"kv_dtype": "awq"}, f"serving.kv_dtype is 'awq'; {KV}", "that which the engine computes in"),
        ({"quantization": "aqw"}, f"serving.quantization is 'aqw'; {METHODS}", "weights that are not quantized"),
        ({"quantization": "none"}, f"serving.quantization is 'none'; {METHODS}", "weights that are not quantized"),
        ({"quantization": "bfloat16"}, f"serving.quantization is 'bfloat16'; {METHODS}", "that are not quantized"),
    ],
)
def test_other_names_are_refused_by_a_sentence(given: dict[str, Any], said: str, end: str) -> None:
    sentence = f"^{re.escape(said)}.*; leave it out for .*{end}$"
    with pytest.raises(InvalidRunError, match=sentence):
        validate(RunSpec(run="r", model="m", serving=Serving(**given)))
    with pytest.raises(Problem, match=re.escape(said)):
        RunIn.model_validate({"run": "r", "model": "/m", "serving": given}).spec()
