"""`gyre model check` and `ls`: what a directory is, and why it cannot be used."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from opengyre.cli.main import app
from opengyre.policy.describe import describe
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
        (lambda d: change(d, model_type="unheard"), "model_type is 'unheard', which transformers does not know"),
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
