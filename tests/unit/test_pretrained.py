"""Reading a GGUF file: names, rows, config, tokenizer."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.pretrained.catalogue import ENTRIES, FetchError, notice
from opengyre.pretrained.convert import config_of, restore_rows, tensor_name, tokenizer_config, tokenizer_of

FIELDS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 12,
    "llama.feed_forward_length": 20,
    "llama.attention.head_count": 3,
    "llama.attention.head_count_kv": 1,
    "llama.rope.freq_base": np.float32(100_000.0),
    "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<|end|>", "a", "b", "1", "2", "ab", "12", "<x>"],
    "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 1, 4],
    "tokenizer.ggml.merges": ["a b", "1 2"],
    "tokenizer.ggml.eos_token_id": 0,
}


def interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to the rows."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


@given(heads=st.integers(1, 4), half=st.integers(1, 4), width=st.integers(1, 3))
def test_rows_come_back_from_llama_cpps_order(heads: int, half: int, width: int) -> None:
    weight = np.arange(heads * 2 * half * width, dtype=np.float32).reshape(heads * 2 * half, width)
    assert np.array_equal(restore_rows(interleaved(weight, heads), heads), weight)
    assert half == 1 or not np.array_equal(interleaved(weight, heads), weight)


def test_tensors_have_the_names_of_a_llama_and_others_are_refused() -> None:
    assert tensor_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    assert tensor_name("output_norm.weight") == "model.norm.weight"
    with pytest.raises(FetchError, match=r"has the tensor rope_freqs.weight, which a Llama-type model does not"):
        tensor_name("rope_freqs.weight")


def test_the_config_is_that_of_the_files_metadata() -> None:
    config = config_of(FIELDS, tied=True)
    assert (config["rope_theta"], config["rms_norm_eps"]) == (100_000.0, 1e-5)
    assert (config["head_dim"], config["num_key_value_heads"], config["vocab_size"]) == (4, 1, 8)
    assert (config["eos_token_id"], config["tie_word_embeddings"]) == (0, True)
    assert "bos_token_id" not in config
    with pytest.raises(FetchError, match="architecture is 'mamba'; allowed is 'llama'"):
        config_of({**FIELDS, "general.architecture": "mamba"}, tied=True)
    with pytest.raises(FetchError, match=r"lacks 'llama.context_length'"):
        config_of({name: value for name, value in FIELDS.items() if "context" not in name}, tied=True)


def test_the_tokenizer_splits_digits_and_knows_special_tokens() -> None:
    tokenizer = tokenizer_of(FIELDS)
    assert tokenizer.encode("ab12<x><|end|>").tokens == ["ab", "1", "2", "<x>", "<|end|>"]
    assert tokenizer.decode([5, 7, 0], skip_special_tokens=True) == "ab<x>"
    assert tokenizer_of({**FIELDS, "tokenizer.ggml.pre": "gpt-2"}).encode("12").tokens == ["12"]
    with pytest.raises(FetchError, match="tokenizer is gpt2/unheard; allowed is gpt2 with one of smollm, gpt-2"):
        tokenizer_of({**FIELDS, "tokenizer.ggml.pre": "unheard"})
    assert tokenizer_config(FIELDS)["eos_token"] == "<|end|>"
    assert "bos_token" not in tokenizer_config(FIELDS)


def test_a_notice_names_licence_source_and_hash() -> None:
    for found in ENTRIES.values():
        text = notice(found)
        assert all(part in text for part in (found.licence, found.origin, found.package, found.sha256))
