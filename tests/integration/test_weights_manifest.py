"""Versions of weights: atomic, verified, deterministic. (A directory of its own is all the outside they touch.)"""

import json
import tracemalloc
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from opengyre.proto.weights import Manifest
from opengyre.tiny.checkpoint import load_pretrained, load_tensors, save_pretrained
from opengyre.tiny.config import CONFIG_FILE, ModelDirectoryError, TinyConfig
from opengyre.tiny.model import TinyModel
from opengyre.weights import write as write_module
from opengyre.weights.manifest import (
    MANIFEST_FILE,
    ChecksumError,
    MissingFileError,
    VersionExistsError,
    damaged,
    read,
    verify,
)
from opengyre.weights.write import version_directory, write_version

pytestmark = pytest.mark.torch


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in (("b", (8, 4)), ("a", (3,)), ("c", (64,)))}


def _write(root: Path, seed: int = 1, version: int = 3, **fields) -> Manifest:
    directory = version_directory(root, version)
    return write_version(_tensors(seed), directory, run="r", version=version, parent=version - 1, step=6, **fields)


def test_a_version_is_read_as_it_was_written(tmp_path: Path) -> None:
    manifest = _write(tmp_path, extra={CONFIG_FILE: b"{}"})
    directory = tmp_path / "v000003"
    assert manifest.directory == str(directory)
    assert read(directory) == manifest
    assert {file.name for file in manifest.files} == {"model.safetensors", CONFIG_FILE}
    verify(manifest)
    found = load_file(directory / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in _tensors(1).items())
    assert [path.name for path in tmp_path.iterdir()] == ["v000003"]


def test_equal_tensors_make_equal_files(tmp_path: Path) -> None:
    one, other = _write(tmp_path / "x"), _write(tmp_path / "y")
    assert one.files == other.files
    assert _write(tmp_path / "z", seed=2).files != one.files


def test_repeating_a_write_changes_nothing_and_another_is_refused(tmp_path: Path) -> None:
    manifest = _write(tmp_path)
    assert _write(tmp_path) == manifest
    with pytest.raises(VersionExistsError, match="v000003"):
        _write(tmp_path, seed=2)
    (tmp_path / "v000004").mkdir()
    (tmp_path / "v000004" / "note").touch()
    with pytest.raises(VersionExistsError, match="v000004"):
        _write(tmp_path, version=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000003", "v000004"]
    verify(read(tmp_path / "v000003"))


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise OSError(f"no space for {path}")

    monkeypatch.setattr(write_module, "describe", fail)
    with pytest.raises(OSError, match="no space"):
        _write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_differs_is_named(tmp_path: Path) -> None:
    manifest = _write(tmp_path)
    path = Path(manifest.directory) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ChecksumError, match="SHA-256") as differs:
        verify(manifest)
    assert differs.value.file == path
    path.write_bytes(content[:-1])
    with pytest.raises(ChecksumError, match="bytes"):
        verify(manifest)
    path.unlink()
    with pytest.raises(MissingFileError, match=r"version 3: .*model\.safetensors does not exist"):
        verify(manifest)


def test_what_is_damaged_is_put_right_by_writing_again(tmp_path: Path) -> None:
    manifest = _write(tmp_path, extra={CONFIG_FILE: b"{}"})
    directory = Path(manifest.directory)
    assert damaged(directory) == []
    whole = (directory / CONFIG_FILE).stat().st_ino
    (directory / "model.safetensors").write_bytes(b"none")
    assert damaged(directory) == ["model.safetensors"]
    assert _write(tmp_path, extra={CONFIG_FILE: b"{}"}) == manifest
    verify(manifest)
    assert (directory / CONFIG_FILE).stat().st_ino == whole, "what is whole is left alone"
    (directory / MANIFEST_FILE).write_bytes(b"{")
    (directory / CONFIG_FILE).unlink()
    assert damaged(directory) == [MANIFEST_FILE]
    assert _write(tmp_path, extra={CONFIG_FILE: b"{}"}) == manifest
    assert damaged(directory) == []
    assert read(directory) == manifest
    (directory / CONFIG_FILE).unlink()
    with pytest.raises(VersionExistsError, match="v000003"):
        _write(tmp_path, seed=2, extra={CONFIG_FILE: b"{}"})
    assert damaged(directory) == [CONFIG_FILE], "another version's files are not mixed in"


def test_a_manifest_that_lacks_a_shard_is_refused_by_its_name(tmp_path: Path) -> None:
    manifest = _write(tmp_path, shard_bytes=150)
    shards = [file for file in manifest.files if file.name.startswith("model-")]
    assert len(shards) > 1
    lacking = msgspec.structs.replace(manifest, files=tuple(file for file in manifest.files if file != shards[1]))
    with pytest.raises(MissingFileError, match=f"version 3: the manifest lacks the shard {shards[1].name}"):
        verify(lacking)
    without = msgspec.structs.replace(manifest, files=tuple(f for f in manifest.files if f not in shards))
    with pytest.raises(MissingFileError, match="version 3: the manifest lists no safetensors file"):
        verify(without)
    (Path(manifest.directory) / shards[0].name).unlink()
    with pytest.raises(MissingFileError, match=shards[0].name):
        verify(manifest)


def test_a_manifest_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=MANIFEST_FILE):
        read(tmp_path)
    (tmp_path / MANIFEST_FILE).write_text('{"run": 3}')
    with pytest.raises(ChecksumError, match="not a manifest"):
        read(tmp_path)


def test_a_version_may_move(tmp_path: Path) -> None:
    _write(tmp_path)
    (tmp_path / "v000003").rename(tmp_path / "moved")
    manifest = read(tmp_path / "moved")
    assert manifest.directory == str(tmp_path / "moved")
    verify(manifest)


def test_large_models_are_sharded_and_load(tmp_path: Path) -> None:
    model = TinyModel(TinyConfig(60), seed=4)
    config = json.dumps(model.config.to_hf()).encode()
    state = dict(model.named_parameters())
    directory = tmp_path / "v"
    manifest = write_version(
        state, directory, run="r", version=0, parent=None, step=0, extra={CONFIG_FILE: config}, shard_bytes=300_000
    )
    assert sum(file.name.startswith("model-") for file in manifest.files) > 3
    verify(manifest)
    loaded = load_pretrained(directory)
    assert all(torch.equal(parameter, state[name]) for name, parameter in loaded.named_parameters())


def test_no_bytes_of_a_version_are_made_while_it_is_written(tmp_path: Path) -> None:
    """As one bytes object for each shard the weights were in memory three times."""
    tensors = {f"layer.{number}": torch.ones(1 << 20) for number in range(8)}
    tracemalloc.start()
    try:
        manifest = write_version(tensors, tmp_path / "v", run="r", version=0, parent=None, step=0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert manifest.files[0].bytes > 32 << 20
    assert peak < 4 << 20


def test_whoever_may_read_the_folder_may_read_a_version(tmp_path: Path) -> None:
    manifest = _write(tmp_path, extra={CONFIG_FILE: b"{}"})
    assert {(Path(manifest.directory) / file.name).stat().st_mode & 0o444 for file in manifest.files} == {0o444}


def test_a_model_directory_survives_and_its_faults_are_named(tmp_path: Path) -> None:
    model = TinyModel(TinyConfig(60), seed=4)
    save_pretrained(model, tmp_path)
    again = load_pretrained(tmp_path)
    tokens = torch.arange(20)[None]
    assert torch.equal(again(tokens), model(tokens))
    with pytest.raises(ModelDirectoryError, match=r"embed_tokens\.weight has the shape"):
        load_tensors(tmp_path, TinyConfig(61))
    with pytest.raises(ModelDirectoryError, match=r"layers\.2\..* is missing"):
        load_tensors(tmp_path, TinyConfig(60, num_hidden_layers=3))
    with pytest.raises(ModelDirectoryError, match="not one of this model's"):
        load_tensors(tmp_path, TinyConfig(60, num_hidden_layers=1))
    fields = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**fields, "num_key_value_heads": 2}))
    with pytest.raises(ModelDirectoryError, match="num_key_value_heads is 2; the tiny engine needs 4"):
        load_pretrained(tmp_path)
    (tmp_path / CONFIG_FILE).unlink()
    with pytest.raises(ModelDirectoryError, match=r"config\.json"):
        load_pretrained(tmp_path)


def test_tensor_names_are_hugging_faces() -> None:
    names = {name for name, _ in TinyModel(TinyConfig(60)).named_parameters()}
    layer = {
        f"model.layers.{n}.{part}.weight"
        for n in (0, 1)
        for part in (
            "input_layernorm",
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "post_attention_layernorm",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        )
    }
    assert names == {"model.embed_tokens.weight", "model.norm.weight", *layer}
