"""The tokenizer's files."""

from pathlib import Path

import pytest

from opengyre.shelltasks.demonstrate import demonstrations
from opengyre.shelltasks.warmstart import train_tokenizer
from opengyre.tiny.tokenizer import TOKENIZER_FILE, TinyTokenizer


def test_a_saved_tokenizer_is_the_same(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(demonstrations(100, seed=1))
    tokenizer.save(tmp_path)
    assert TinyTokenizer.load(tmp_path).files() == tokenizer.files()
    (tmp_path / TOKENIZER_FILE).unlink()
    with pytest.raises(ValueError, match=TOKENIZER_FILE):
        TinyTokenizer.load(tmp_path)
