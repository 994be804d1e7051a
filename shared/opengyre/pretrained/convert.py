"""A GGUF file of a Llama-type model as the files of a model directory in Hugging Face's layout. Reads one file.

Invariants: weights are float32, exactly what the quantised blocks stand for; the rows of the query and key projections,
which llama.cpp interleaves for its rotary embedding, are put back; nothing of the file is left out silently: a tensor,
an architecture or a pre-tokenizer that is not known is refused.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGUFReader
from gguf.quants import QuantError, dequantize
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from opengyre.pretrained.catalogue import FetchError

Tensors = dict[str, NDArray[np.float32]]

OUTER: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
INNER: Final = {
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_BLOCK: Final = re.compile(r"blk\.(\d+)\.(.+)")
CONTROL, USER_DEFINED = 3, 4
"""Types of tokens in the file: special ones, and others that are taken whole."""


def _digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


PRE_TOKENIZERS: Final = {
    "smollm": _digits,
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
}


@dataclass(frozen=True)
class Converted:
    tensors: Tensors
    files: dict[str, str]
    """Name -> content of config and tokenizer files."""


def restore_rows(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo the order that llama.cpp gives the rows of a query or key projection: per head, the halves were
    interleaved."""
    rows = weight.shape[0]
    return weight.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def tensor_name(name: str) -> str:
    """The tensor's name in a `LlamaForCausalLM`; raises `FetchError`."""
    block = _BLOCK.fullmatch(name)
    if block is not None and block[2] in INNER:
        return f"model.layers.{block[1]}.{INNER[block[2]]}"
    if name in OUTER:
        return OUTER[name]
    raise FetchError(f"the GGUF file has the tensor {name}, which a Llama-type model does not")


def _float(value: Any) -> float:
    """The shortest number that is this float32."""
    return float(str(np.float32(value)))


def config_of(fields: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """Content of `config.json` from the file's metadata; raises `FetchError`."""
    kind = fields.get("general.architecture")
    if kind != "llama":
        raise FetchError(f"the GGUF file's architecture is {kind!r}; allowed is 'llama'")
    try:
        heads = fields["llama.attention.head_count"]
        width = fields["llama.embedding_length"]
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "vocab_size": len(fields["tokenizer.ggml.tokens"]),
            "hidden_size": width,
            "intermediate_size": fields["llama.feed_forward_length"],
            "num_hidden_layers": fields["llama.block_count"],
            "num_attention_heads": heads,
            "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
            "head_dim": fields.get("llama.rope.dimension_count", width // heads),
            "max_position_embeddings": fields["llama.context_length"],
            "rope_theta": _float(fields.get("llama.rope.freq_base", 10_000.0)),
            "rms_norm_eps": _float(fields["llama.attention.layer_norm_rms_epsilon"]),
            "tie_word_embeddings": tied,
            "torch_dtype": "float32",
        }
    except KeyError as missing:
        raise FetchError(f"the GGUF file lacks {missing}") from missing
    return {**config, **_ids(fields)}


def _ids(fields: Mapping[str, Any]) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {
        ours: int(fields[f"tokenizer.ggml.{theirs}_token_id"])
        for ours, theirs in names.items()
        if f"tokenizer.ggml.{theirs}_token_id" in fields
    }


def tokenizer_of(fields: Mapping[str, Any]) -> Tokenizer:
    """The byte-level BPE that the file describes; raises `FetchError`."""
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        allowed = ", ".join(PRE_TOKENIZERS)
        raise FetchError(f"the GGUF file's tokenizer is {kind}/{pre}; allowed is gpt2 with one of {allowed}")
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    return tokenizer


def tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Content of `tokenizer_config.json`."""
    tokens = fields["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    places = {ours: fields.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in names.items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        **{name: tokens[place] for name, place in places.items() if place is not None},
    }
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    return config


def _json(content: Any) -> str:
    return json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def convert(path: Path) -> Converted:
    """The files of a model directory made from the GGUF file `path`; raises `FetchError`."""
    try:
        reader = GGUFReader(path)
    except (OSError, ValueError, IndexError) as error:
        raise FetchError(f"{path.name} is not a readable GGUF file: {error}") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    names = {tensor.name for tensor in reader.tensors}
    config = config_of(fields, tied="output.weight" not in names)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors: Tensors = {}
    for tensor in reader.tensors:
        name = tensor_name(tensor.name)
        try:
            weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except (QuantError, NotImplementedError) as error:
            raise FetchError(f"{path.name}: the tensor {tensor.name} cannot be dequantised: {error}") from error
        projection = name.split(".")[-2]
        if projection in heads:
            weight = restore_rows(weight, heads[projection])
        tensors[name] = np.ascontiguousarray(weight)
    ids = _ids(fields)
    files = {
        "config.json": _json(config),
        "generation_config.json": _json({"_from_model_config": True, **ids}),
        "tokenizer.json": tokenizer_of(fields).to_str(pretty=True),
        "tokenizer_config.json": _json(tokenizer_config(fields)),
    }
    return Converted(tensors, files)
