"""Policies as directories that `transformers` opens: exact logits, the same tokens, nothing of the run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from opengyre.cli.main import app
from opengyre.policy.export import export, version_of
from opengyre.tiny.config import ModelDirectoryError, TinyConfig
from opengyre.tiny.model import TinyModel
from opengyre.tiny.tokenizer import TinyTokenizer
from opengyre.weights.place import damaged
from opengyre.weights.write import write_version
from support.models import LLAMA, save_stock

pytestmark = pytest.mark.torch
TOKENIZER = TinyTokenizer.train(["echo one > a.txt", "write plum into box", "done"], 300)
CHAT = [
    {"role": "system", "content": "be brief"}, {"role": "user", "content": " write plum into box.txt\n"},
    {"role": "assistant", "content": "echo plum > box.txt"}, {"role": "tool", "content": ""},
]  # fmt: skip


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 0 and 12 of a run of the tiny policy."""
    root = tmp_path_factory.mktemp("state") / "weights" / "demo"
    config = TinyConfig(vocab_size=TOKENIZER.vocab_size)
    files = {name: content.encode() for name, content in TOKENIZER.files().items()}
    files["config.json"] = json.dumps(config.to_hf()).encode()
    for version, seed in ((0, 1), (12, 2)):
        tensors = {name: p.detach() for name, p in TinyModel(config, seed=seed).named_parameters()}
        parent = None if version == 0 else 0
        write_version(
            tensors, root / f"v{version:06d}", run="demo", version=version, parent=parent, step=version, extra=files
        )
    return root


def test_transformers_computes_what_the_tiny_policy_computes(weights: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    made = tmp_path / "out"
    found = CliRunner().invoke(
        app, ["model", "export", "demo", "--to", str(made), "--state-dir", str(weights.parent.parent), "--json"]
    )
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["source"] == str(weights / "v000012")
    tiny = TinyModel(TinyConfig.load(made), seed=2)
    theirs: Any = AutoModelForCausalLM.from_pretrained(made, local_files_only=True).eval()
    assert type(theirs).__name__ == "LlamaForCausalLM"
    ids = torch.arange(60).reshape(2, 30) + 5
    with torch.no_grad():
        wanted = tiny(ids)
        logits = theirs(ids).logits
    assert float((logits - wanted).abs().max()) < 2e-6 * float(wanted.abs().max())
    tokenizer = AutoTokenizer.from_pretrained(made, local_files_only=True)
    rendered = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert rendered == TOKENIZER.render(CHAT)
    assert GenerationConfig.from_pretrained(made).eos_token_id == TOKENIZER.end_id


def test_a_copy_has_nothing_of_the_run_and_sums_of_its_own(weights: Path, tmp_path: Path) -> None:
    export(version_of(weights, 0), tmp_path / "deep" / "out")
    names = {path.name for path in (tmp_path / "deep" / "out").iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "SHA256SUMS",
    }  # fmt: skip
    assert damaged(tmp_path / "deep" / "out") == []
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_a_stock_model_in_shards_is_copied_whole(tmp_path: Path) -> None:
    from opengyre.policy.open import open_policy

    source = save_stock(tmp_path / "m", {**LLAMA, "vocab_size": 300}, shard_bytes=4096)
    TOKENIZER.save(source)
    export(source, tmp_path / "out")
    one, two = open_policy(source).tensors(), open_policy(tmp_path / "out").tensors()
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_damaged_versions_are_passed_over_and_refused_by_number(weights: Path, tmp_path: Path) -> None:
    shutil.copytree(weights, tmp_path / "weights")
    (tmp_path / "weights" / "v000012" / "config.json").write_text("{}")
    assert version_of(tmp_path / "weights").name == "v000000"
    with pytest.raises(ModelDirectoryError, match="does not hold version 12 of the weights; there are: 0, 12"):
        version_of(tmp_path / "weights", 12)
    with pytest.raises(ModelDirectoryError, match="does not hold a whole version of the weights; there are: none"):
        version_of(tmp_path / "nothing")
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelDirectoryError, match=r"out exists; name a directory that does not"):
        export(weights / "v000000", tmp_path / "out")
    with (tmp_path / "weights" / "v000000" / "tokenizer_config.json").open("a") as file:
        file.write(" ")
    with pytest.raises(ModelDirectoryError, match=r"tokenizer_config.json has .* bytes; the manifest says"):
        export(tmp_path / "weights" / "v000000", tmp_path / "other")
    assert not (tmp_path / "other").exists()
