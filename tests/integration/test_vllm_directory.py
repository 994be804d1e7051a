"""What the vLLM engine reads of a model directory, and what it brings into vLLM's environment."""

from pathlib import Path
from typing import Any

import pytest

from opengyre.host import vllm_plan
from opengyre.host.vllm_plan import facts_of
from opengyre.tiny.config import ModelDirectoryError
from support.vllm_directory import model


def test_what_a_model_takes_is_read_from_its_directory(tmp_path: Path) -> None:
    found = facts_of(model(tmp_path))
    assert (found.vocabulary, found.context, found.weight_bytes, found.dtype) == (100, 512, 1000, "bfloat16")
    assert found.kv_values == 2 * 4 * 2 * 8
    hybrid = model(tmp_path, layer_types=["linear_attention", "full_attention"] * 2, head_dim=16)
    assert facts_of(hybrid).kv_values == 2 * 2 * 2 * 16


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"vocab_size": None}, "vocab_size is None"), ({"num_hidden_layers": 0}, "num_hidden_layers is 0")],
)
def test_a_config_without_a_number_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelDirectoryError, match=said):
        facts_of(model(tmp_path, **changes))


def test_the_modules_of_the_other_environment_import_nothing_of_ours() -> None:
    side = Path(vllm_plan.__file__).parent / "vllm_side"
    names = {"gyre_vllm_arguments.py", "gyre_vllm_launch.py", "gyre_vllm_sampled.py", "gyre_vllm_worker.py"}
    assert {path.name for path in side.glob("*.py")} == names
    assert not any("opengyre" in path.read_text() for path in side.glob("*.py"))
