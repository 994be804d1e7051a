"""`gyre model check` and `ls`: what a directory is, and why it cannot be used."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from opengyre.cli.main import app
from opengyre.policy.describe import describe
from opengyre.policy.fields import LAYER_TYPES, ROPE_TYPES, TRAINED
from opengyre.tiny.config import ModelDirectoryError
from opengyre.tiny.tokenizer import TinyTokenizer
from support.models import LLAMA, save_stock

pytestmark = pytest.mark.torch
FIELDS = {**LLAMA, "vocab_size": 270}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = save_stock(tmp_path / "models" / "llama", FIELDS, shard_bytes=4096)
    TinyTokenizer.train(["abc"], 262).save(directory)
    return directory


def test_check_says_what_a_directory_is(model: Path) -> None:
    found = CliRunner().invoke(app, ["model", "check", str(model), "--json"])
    assert found.exit_code == 0, found.output
    facts = json.loads(found.stdout)
    weights = 2 * 270 * 16 + 2 * (2 * 16 * 16 + 2 * 8 * 16 + 3 * 16 * 24 + 2 * 16) + 16
    assert facts == {
        "directory": str(model), "architecture": "LlamaForCausalLM", "model_type": "llama", "tiny": False,
        "parameters": weights, "dtypes": ["float32"], "vocabulary": 270, "tokens": 262, "context": 128, "tied": False,
        "chat_template": True, "bytes": facts["bytes"],
    }  # fmt: skip
    assert facts["bytes"] > 4 * weights
    shown = CliRunner().invoke(app, ["model", "check", str(model)]).stdout
    assert "LlamaForCausalLM" in shown
    assert "chat template  yes" in shown


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json does not exist; a run's policy has a tokenizer"),
        (lambda d: change(d, vocab_size=280), "vocab_size is 280; embed_tokens.weight has 270 rows, so 270 is allowed"),
        (
            lambda d: change(d, model_type="unheard"),
            "model_type is 'unheard', which cannot be trained exactly; allowed are llama, ",
        ),
        (lambda d: change(d, vocab_size=200), "the tokenizer has the id 261; vocab_size in config.json is 200"),
    ],
)
def test_what_can_be_no_policy_is_refused_in_a_sentence(model: Path, harm: object, reason: str) -> None:
    assert callable(harm)
    harm(model)
    with pytest.raises(ModelDirectoryError) as caught:
        describe(model)
    assert reason in str(caught.value)
    refused = CliRunner().invoke(app, ["model", "check", str(model)])
    assert refused.exit_code == 1
    assert refused.stdout == ""


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_hidden_layers": -3}, "num_hidden_layers is -3; allowed are whole numbers from 1"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3; the weights have 2 layers, so 2 is allowed"),
        ({"hidden_size": "16"}, "hidden_size is '16'; allowed are whole numbers from 1"),
        ({"hidden_size": 32}, "hidden_size is 32; embed_tokens.weight has 16 columns, so 16 is allowed"),
        ({"intermediate_size": 25}, "intermediate_size is 25; up_proj.weight has 24 rows, so 24 is allowed"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; allowed are whole numbers from 1"),
        ({"num_attention_heads": 3}, "num_attention_heads is 3; hidden_size is 16, so allowed are numbers that divide"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; num_attention_heads is 4, so allowed are numbers that"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4 with heads of 4 numbers; k_proj.weight has 8 rows, so"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0; allowed are whole numbers from 1"),
        ({"torch_dtype": "int3"}, "torch_dtype is 'int3'; allowed are float32, bfloat16, float16, float64"),
        ({"dtype": 3}, "dtype is 3; allowed are float32, bfloat16, float16, float64"),
        ({"model_type": "mistral"}, "allowed are llama, qwen2, qwen3, qwen3_next, qwen3_5_text"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2', which cannot be trained exactly; allowed are llama, qwen2"),
        ({"num_experts": 8}, "num_experts is 8; models with experts cannot be trained exactly, so allowed is 0"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling has the rope_type 'dynamic'"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types has 'sliding_attention', which cannot be trained"),
    ],
)
def test_a_senseless_config_is_refused_by_its_field(model: Path, fields: dict[str, object], reason: str) -> None:
    change(model, **fields)
    with pytest.raises(ModelDirectoryError) as caught:
        describe(model)
    assert str(caught.value).startswith(f"{model / 'config.json'}: ")
    assert reason in str(caught.value)


def test_families_that_are_said_to_be_trained_are_those_that_have_a_driver() -> None:
    from opengyre.treegrad.drivers import find

    assert (TRAINED, LAYER_TYPES, ROPE_TYPES) == (find.FAMILIES, find.LAYER_TYPES, find.ROPE_TYPES)


def test_a_template_that_marks_what_the_assistant_says_can_be_parsed(model: Path) -> None:
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    )
    assert describe(model).chat_template
    (model / "chat_template.jinja").write_text(" ")
    (model / "tokenizer_config.json").unlink(missing_ok=True)
    (model / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    assert not describe(model).chat_template, "an empty file is none"


def change(directory: Path, **fields: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_ls_lists_models_and_those_that_cannot_be_used(model: Path) -> None:
    broken = save_stock(model.parent / "broken", FIELDS)
    found = json.loads(CliRunner().invoke(app, ["model", "ls", str(model.parent.parent), "--json"]).stdout)
    assert [row["directory"] for row in found["models"]] == [str(broken), str(model)]
    assert "tokenizer.json does not exist" in found["models"][0]["error"]
    assert found["fetchable"][0]["name"] == "smollm2-135m"
    assert "smollm2-135m" in CliRunner().invoke(app, ["model", "ls", str(model.parent / "nothing")]).stdout


def test_fetch_refuses_an_unknown_name() -> None:
    refused = CliRunner().invoke(app, ["model", "fetch", "gpt-9"])
    assert refused.exit_code == 1
    assert "allowed are smollm2-135m" in refused.stderr
