"""Model directories that are opened as policies, and those that are refused by a sentence."""

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from opengyre.policy.directory import INDEX_FILE, TOKENIZER_FILE, check_directory, tiny_config
from opengyre.policy.open import build, open_policy, refill
from opengyre.tiny.checkpoint import save_pretrained
from opengyre.tiny.config import CONFIG_FILE, ModelDirectoryError, TinyConfig
from opengyre.tiny.model import TinyModel
from opengyre.weights.write import write_version
from support.models import LLAMA, save_stock

pytestmark = pytest.mark.torch
CONFIG = TinyConfig(vocab_size=16, hidden_size=16, num_attention_heads=2, intermediate_size=16, num_hidden_layers=1)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    save_pretrained(TinyModel(CONFIG, seed=1), tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_stock(tmp_path / "llama", LLAMA, shard_bytes=4096)


def change(directory: Path, name: str, **fields: object) -> None:
    path = directory / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_our_own_directory_is_opened_without_transformers(tiny: Path) -> None:
    policy = open_policy(tiny)
    assert isinstance(policy.model, TinyModel)
    assert (policy.model_type, policy.vocabulary, policy.context) == ("tiny", 16, 512)
    wanted = dict(TinyModel(CONFIG, seed=1).named_parameters())
    assert all(torch.equal(found, wanted[name]) for name, found in policy.tensors().items())


def test_a_stock_model_is_the_one_that_transformers_opens(llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    policy = open_policy(llama)
    assert (policy.model_type, policy.vocabulary, policy.context) == ("llama", 40, 128)
    assert not policy.model.training
    theirs = AutoModelForCausalLM.from_pretrained(llama, local_files_only=True)
    tokens = torch.arange(12)[None]
    assert torch.equal(policy.model(tokens).logits, theirs(tokens).logits)
    assert policy.parameters().keys() == dict(theirs.named_parameters()).keys()


def test_building_a_model_leaves_the_random_generator_where_it_was(llama: Path) -> None:
    before = torch.get_rng_state()
    build(llama)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_version_that_is_written_of_a_stock_model_is_a_model_directory(llama: Path, tmp_path: Path) -> None:
    policy = open_policy(llama)
    extra = {CONFIG_FILE: (llama / CONFIG_FILE).read_bytes()}
    write_version(
        policy.tensors(), tmp_path / "v", run="r", version=0, parent=None, step=0, extra=extra, shard_bytes=5000
    )
    again = open_policy(tmp_path / "v")
    assert len(list((tmp_path / "v").glob("model-*.safetensors"))) > 2
    assert all(torch.equal(tensor, policy.tensors()[name]) for name, tensor in again.tensors().items())


def test_a_policy_takes_the_weights_of_another_version_in_place(llama: Path, tmp_path: Path) -> None:
    policy, wanted = open_policy(llama), open_policy(save_stock(tmp_path / "other", LLAMA, seed=5))
    places = {name: parameter.data_ptr() for name, parameter in policy.parameters().items()}
    refill(policy, tmp_path / "other")
    assert all(torch.equal(tensor, wanted.tensors()[name]) for name, tensor in policy.tensors().items())
    assert {name: parameter.data_ptr() for name, parameter in policy.parameters().items()} == places


def test_weights_of_half_precision_are_trained_in_float32(llama: Path) -> None:
    path = min(llama.glob("model-*.safetensors"))
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    change(llama, CONFIG_FILE, dtype="bfloat16")
    assert {parameter.dtype for parameter in open_policy(llama).parameters().values()} == {torch.float32}


def test_a_llama_that_the_tiny_decoder_would_compute_otherwise_is_not_taken_for_ours() -> None:
    fields = CONFIG.to_hf()
    assert tiny_config(fields) == CONFIG
    for name, value in (("rope_scaling", {"type": "linear"}), ("head_dim", 4), ("attention_bias", True)):
        assert tiny_config({**fields, name: value}) is None
    assert tiny_config({**fields, "rope_scaling": None}) == CONFIG


def test_our_own_config_is_known_again_as_transformers_5_writes_it(tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = replace(CONFIG, rope_theta=5000.0)
    config.save(tiny)
    AutoConfig.from_pretrained(tiny, local_files_only=True).save_pretrained(tmp_path / "again")
    fields = json.loads((tmp_path / "again" / CONFIG_FILE).read_text())
    assert fields["rope_parameters"] == {"rope_theta": 5000.0, "rope_type": "default"}
    assert "rope_theta" not in fields
    assert tiny_config(fields) == config
    for other in ({"rope_type": "linear", "factor": 2.0}, {"partial_rotary_factor": 0.5}, 3):
        changed = {**fields["rope_parameters"], **other} if isinstance(other, dict) else other
        assert tiny_config({**fields, "rope_parameters": changed}) is None


def refused(directory: Path, sentence: str) -> None:
    with pytest.raises(ModelDirectoryError, match=sentence):
        open_policy(directory)


def test_what_is_missing_is_named(llama: Path, tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere is no directory")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", r"empty/config\.json does not exist")
    sorted(llama.glob("model-*"))[1].unlink()
    refused(llama, r"model-00002-of-.*\.safetensors does not exist; model\.safetensors\.index\.json names it")
    (llama / INDEX_FILE).write_text("{}")
    refused(llama, r"model\.safetensors\.index\.json: weight_map is missing")
    (llama / INDEX_FILE).unlink()
    refused(llama, r"model\.safetensors does not exist; weights are read from safetensors files")


def test_a_tensor_that_does_not_fit_is_named(llama: Path) -> None:
    path = min(llama.glob("model-*.safetensors"))
    tensors = load_file(path)
    first = min(tensors)
    save_file({name: tensor for name, tensor in tensors.items() if name != first}, path)
    refused(llama, f"the tensor {first} is missing")
    save_file({**tensors, first: torch.zeros(3, 5)}, path)
    refused(llama, rf"{first} has the shape \(3, 5\)")
    save_file({**tensors, "model.other": torch.zeros(3)}, path)
    refused(llama, r"the tensor model\.other is not one of this model's")
    save_file({**tensors, first: tensors[first].to(torch.int8)}, path)
    refused(llama, rf"the tensor {first} is of torch\.int8; allowed are floating-point weights")
    for value in (math.nan, math.inf):
        broken = tensors[first].clone()
        broken[0] = value
        save_file({**tensors, first: broken}, path)
        refused(llama, f"the tensor {first} has values that are not finite")
    path.write_bytes(b"none")
    refused(llama, r"model-00001-of-.* is not a safetensors file")


def test_a_config_that_cannot_be_used_is_named(llama: Path) -> None:
    change(llama, CONFIG_FILE, model_type="no_such_family")
    refused(llama, r"config\.json: model_type is 'no_such_family', which transformers does not know")
    change(llama, CONFIG_FILE, model_type=None)
    refused(llama, r"config\.json: model_type is missing")
    (llama / CONFIG_FILE).write_text("[]")
    refused(llama, r"config\.json holds a list")
    (llama / CONFIG_FILE).write_text("{")
    refused(llama, r"config\.json is not readable JSON")


@pytest.mark.parametrize("kind", ["tiny", "llama"])
@pytest.mark.parametrize(
    ("field", "value"),
    [("num_attention_heads", 7), ("num_attention_heads", 0), ("vocab_size", "40"), ("vocab_size", -3)],
)
def test_values_at_which_transformers_fails_with_faults_of_its_own_are_refused_by_file(
    request: pytest.FixtureRequest, kind: str, field: str, value: object
) -> None:
    directory: Path = request.getfixturevalue(kind)
    heads = {"num_key_value_heads": value} if (kind, field) == ("tiny", "num_attention_heads") else {}
    change(directory, CONFIG_FILE, **{field: value}, **heads)
    with pytest.raises(ModelDirectoryError) as caught:
        open_policy(directory)
    sentence = str(caught.value)
    assert sentence.startswith(f"{directory / CONFIG_FILE}: ")
    assert "\n" not in sentence


def test_a_model_that_no_driver_computes_is_refused_with_its_directory(llama: Path) -> None:
    change(llama, CONFIG_FILE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    policy = open_policy(llama)
    with pytest.raises(ModelDirectoryError, match=f"^{llama / CONFIG_FILE}: this model cannot be trained exactly"):
        policy.driver()


@pytest.mark.parametrize("kind", ["tiny", "llama"])
def test_what_a_look_at_a_directory_refuses_is_what_cannot_be_opened(request: pytest.FixtureRequest, kind: str) -> None:
    directory: Path = request.getfixturevalue(kind)
    (directory / TOKENIZER_FILE).write_text('{"model": {"vocab": {"a": 0}}}')
    check_directory(directory)
    path = max(directory.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelDirectoryError, match=rf"{path} has \d+ bytes; its header says \d+"):
        check_directory(directory)
    refused(directory, f"{path} is not a safetensors file")


@pytest.mark.parametrize("kind", ["tiny", "llama"])
def test_quantized_weights_and_code_of_a_models_own_are_refused_by_field(
    request: pytest.FixtureRequest, kind: str
) -> None:
    directory: Path = request.getfixturevalue(kind)
    plain = (directory / CONFIG_FILE).read_text()
    change(directory, CONFIG_FILE, quantization_config={"quant_method": "gptq", "bits": 4})
    refused(directory, r"config\.json: quantization_config is set; quantized weights cannot be trained")
    (directory / CONFIG_FILE).write_text(plain)
    open_policy(directory)
    change(directory, CONFIG_FILE, auto_map={"AutoModelForCausalLM": "x.Y"})
    refused(directory, r"config\.json: auto_map is set; code that comes with a model is not run")


@pytest.mark.parametrize("kind", ["tiny", "llama"])
@pytest.mark.parametrize(
    "tokenizer",
    [
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 40}}},
        {"model": {"type": "Unigram", "vocab": [["a", 0.0]] * 41}},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 40, "content": "<end>"}]},
    ],
)
def test_a_tokenizer_with_more_ids_than_embeddings_is_refused(
    request: pytest.FixtureRequest, kind: str, tokenizer: dict[str, object]
) -> None:
    directory: Path = request.getfixturevalue(kind)
    size = 16 if kind == "tiny" else 40
    (directory / TOKENIZER_FILE).write_text(json.dumps(tokenizer))
    refused(directory, rf"tokenizer\.json: the tokenizer has the id 40; vocab_size in config\.json is {size}")


def test_without_transformers_a_stock_model_is_refused_by_what_to_install(
    llama: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused(llama, r"of type 'llama' is opened by the package transformers; install it with: pip install 'opengyre")
    open_policy(tiny)
