"""`gyre bench engine` where the engine fails: one sentence, and nothing is left of the model that was made."""

import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from opengyre.cli import bench_engine
from opengyre.cli.main import app
from opengyre.cli.stack import StackError
from opengyre.host.vllm import VllmEngine
from opengyre.tiny.types import EngineError

pytestmark = pytest.mark.torch


def test_an_engine_that_fails_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    woken: list[Path] = []

    async def wake(self: VllmEngine, directory: Path, version: int) -> None:
        assert (directory / "tokenizer.json").exists()
        woken.append(directory)
        raise EngineError("it does not like this model")

    monkeypatch.setattr(bench_engine, "checked_interpreter", lambda _: "python")
    monkeypatch.setattr(VllmEngine, "wake", wake)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = CliRunner().invoke(app, ["bench", "engine"])
    assert isinstance(done.exception, StackError)
    assert str(done.exception) == "it does not like this model"
    assert len(woken) == 1
    assert list(tmp_path.iterdir()) == []
