"""Cloning learns what the demonstrator says, and only that."""

import pytest
import torch

from opengyre.shelltasks.clone import CloneSettings, clone, example
from opengyre.shelltasks.demonstrate import demonstrations
from opengyre.shelltasks.warmstart import main, train_tokenizer
from opengyre.tiny.checkpoint import load_pretrained
from opengyre.tiny.config import TinyConfig
from opengyre.tiny.model import TinyModel
from opengyre.tiny.tokenizer import TinyTokenizer

pytestmark = pytest.mark.torch

EPISODES = demonstrations(200, seed=1)
TOKENIZER = train_tokenizer(EPISODES)


def test_targets_are_the_turns_of_the_assistant() -> None:
    for episode in EPISODES[:40]:
        made = example(TOKENIZER, episode)
        assert len(made.tokens) == len(made.targets)
        assert made.tokens == TOKENIZER.render(episode.messages(), generation_prompt=False)
        learned = [target for target in made.targets if target >= 0]
        said = "\n".join(f" {turn.command}" for turn in episode.turns)
        assert TOKENIZER.decode(learned) == said.replace("\n", "")
        assert learned.count(TOKENIZER.end_id) == len(episode.turns)
        for at, target in enumerate(made.targets):
            assert target < 0 or target == made.tokens[at + 1]


def test_cloning_learns_and_repeats_itself() -> None:
    examples = [example(TOKENIZER, episode) for episode in EPISODES]
    models = [TinyModel(TinyConfig(TOKENIZER.vocab_size), seed=1) for _ in range(2)]
    losses: list[float] = []
    for model in models:
        clone(model, examples, CloneSettings(steps=12, batch=16), 3, lambda _, loss: losses.append(loss))
    assert losses[:12] == pytest.approx(losses[12:], rel=1e-3)
    assert losses[11] < losses[0] - 2
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(*(m.parameters() for m in models), strict=True))


def test_the_command_makes_a_model_directory_once(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    arguments = ["--out", str(out), "--seed", "2", "--steps", "2", "--demonstrations", "100"]
    assert main(arguments) == 0
    assert load_pretrained(out).config.vocab_size == TinyTokenizer.load(out).vocab_size
    assert "step 2/2" in capsys.readouterr().err
    assert main(arguments) == 1
    assert "exists" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
