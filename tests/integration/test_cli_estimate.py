"""`gyre run --dry-run` of the recipes that ship, with and without the model: what is expected, and what is refused."""

import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from opengyre.cli.main import app
from opengyre.cli.task_files import TaskFileError

RECIPES = Path(__file__).parents[2] / "recipes"
GPU = RECIPES / "qwen3-8gpu.toml"


def dry(recipe: Path, *options: str) -> dict:
    done = CliRunner().invoke(app, ["run", str(recipe), "--dry-run", "--json", *options])
    if done.exit_code:
        raise done.exception or AssertionError(done.output)
    return json.loads(done.output)


def changed(folder: Path, *changes: tuple[str, str]) -> Path:
    text = GPU.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "shapes").mkdir()
    (folder / "shapes/qwen3-8b.json").write_text((RECIPES / "shapes/qwen3-8b.json").read_text())
    (folder / "r.toml").write_text(text)
    return folder / "r.toml"


def test_the_gpu_recipe_is_that_of_smollm2_but_for_the_policy_and_the_hardware() -> None:
    gpu, small = (tomllib.loads((RECIPES / name).read_text()) for name in ("qwen3-8gpu.toml", "smollm2-shell.toml"))
    assert "hardware" not in small
    assert gpu.pop("hardware")["cell_gpus"] == 2
    for recipe in (gpu, small):
        del recipe["run"]["run"], recipe["run"]["model"]
    assert gpu == small


def test_a_dry_run_says_what_eight_gpus_hold_without_the_model() -> None:
    facts = dry(GPU)
    found = facts["estimate"]
    assert (facts["model_is_here"], found["parameters"]) == (False, 8_190_735_360)
    assert (found["serving"]["engine"], found["serving"]["dtype"]) == ("vllm", "bfloat16")
    assert found["serving"]["weights"] == 2 * 8_190_735_360
    # Nine tenths of two cards of 80 GiB, without the weights; a token is 73,728 numbers of 2 bytes.
    kv = int(2 * (80 << 30) * 0.9) - 2 * 8_190_735_360
    assert (found["serving"]["kv"], found["serving"]["kv_tokens"]) == (kv, kv // 147_456)
    assert found["training"]["gradients"] == 2 * 8_190_735_360
    assert found["trainer"]["optimizer"] == 8 * 8_190_735_360
    assert (found["times"]["rollout_cells"], found["times"]["train_cells"]) == (3, 1)
    assert "optimization.logprob_gap_alarm is 0.05; 0.25 is quiet" in found["notes"][0]
    shown = CliRunner().invoke(app, ["run", str(GPU), "--dry-run"]).output
    assert "is not on this machine: a run needs" in shown
    assert "memory, 8 x H100-80GB, 2 a cell" in shown


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ([("context_tokens = 1024", "context_tokens = 50000")], "the policy has 40960 positions"),
        ([("context_tokens = 1024", "context_tokens = 4096")], "or GYRE_HOST__VLLM_CONTEXT=4096"),
        ([("cell_gpus = 2", "cell_gpus = 1"), ("H100-80GB", "L40S-48GB")], "hardware.cell_gpus = 2 would do"),
        ([("host_gib = 512.0", "host_gib = 150.0")], "optimization.optimizer = adafactor would do"),
        ([('gpu = "H100-80GB"', 'gpu = "V1"')], "hardware.gpu is 'V1'; allowed are"),
        ([("gpus = 8", 'gpus = "8"')], "hardware.gpus is '8'; allowed: a whole number from 0 up to 100000"),
        ([("gpus = 8", "gpus = -8")], "hardware.gpus is -8; allowed: a whole number from 0 up to 100000"),
        ([("cell_gpus = 2", "cell_gpus = 0")], "hardware.cell_gpus is 0; allowed: a whole number from 1 up to 1024"),
        ([("host_gib = 512.0", "host_gib = -1.0")], "hardware.host_gib is -1.0; allowed: a number from 0.001 up to "),
        (
            [("gpus = 8", "gpus = 8\ndecode_efficiency = 7.0")],
            "hardware.decode_efficiency is 7.0; allowed: a number from 0.001 up to 1",
        ),
        (
            [("train_cells = 1", "train_cells = 4")],
            "run.elastic.train_cells is 4 and one at least has to serve, 5 toge",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_number_that_would(
    tmp_path: Path, changes: list[tuple[str, str]], sentence: str
) -> None:
    with pytest.raises(Exception, match=r"r\.toml") as refused:  # the sentence is looked at below
        dry(changed(tmp_path, *changes))
    assert sentence in str(refused.value)


@pytest.mark.parametrize("value", ["inf", "nan", "1e30", "1e-320"])
@pytest.mark.parametrize(
    "field", ["host_gib", "gpu_gib", "peak_tflops", "train_tflops", "memory_gb_s", "load_gb_s", "start_s"]
)
def test_figures_that_no_machine_has_are_refused_with_their_range(tmp_path: Path, field: str, value: str) -> None:
    """Infinite memory was a traceback, as was next to no computing power; infinite seconds were printed."""
    recipe = changed(tmp_path, ("host_gib = 512.0", ""), ("gpus = 8\n", f"gpus = 8\n{field} = {value}\n"))
    with pytest.raises(TaskFileError) as refused:
        dry(recipe)
    sentence = f"hardware.{field} is {float(value)!r}; allowed: a number from 0.001 up to 1000000"
    assert str(refused.value) == f"{recipe}: {sentence}"


@pytest.mark.parametrize("value", ["inf", "nan", "1e-320"])
def test_shares_that_leave_nothing_are_refused_with_their_range(tmp_path: Path, value: str) -> None:
    recipe = changed(tmp_path, ("gpus = 8\n", f"gpus = 8\ndecode_efficiency = {value}\n"))
    with pytest.raises(TaskFileError, match=r"hardware\.decode_efficiency is .*: a number from 0\.001 up to 1$"):
        dry(recipe)


def test_without_a_shape_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="is no directory; it holds a policy"):
        dry(changed(tmp_path, ('config = "shapes/qwen3-8b.json"', "")))
