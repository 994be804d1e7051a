"""Memory and time of a run, against numbers worked out by hand and against the tensors of transformers' own models."""

import json
from pathlib import Path

import pytest

from opengyre.proto.run import Dispatch, Elastic, Harness, RunSpec
from opengyre.sizing import memory
from opengyre.sizing.hardware import GIB, Hardware, HardwareError, machine_of
from opengyre.sizing.shape import Shape, shape_of
from opengyre.sizing.time import PASSES, load_of, times, tokens_per_s
from opengyre.tiny.config import ModelDirectoryError

QWEN3_8B = json.loads((Path(__file__).parents[2] / "recipes/shapes/qwen3-8b.json").read_text())
SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}  # fmt: skip
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 128,
}  # fmt: skip


def shape(fields: dict) -> Shape:
    return shape_of(fields, "config.json")


def test_parameters_and_keys_of_known_models() -> None:
    assert shape(QWEN3_8B).parameters == 8_190_735_360
    assert shape(SMOLLM2).parameters == 134_515_008
    # 36 layers of 8 heads of 128, keys and values; 30 of 3 heads of 64.
    assert shape(QWEN3_8B).kv_values == 73_728
    assert shape(SMOLLM2).kv_values == 11_520


@pytest.mark.torch
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 16}),
        ("qwen3", {"head_dim": 16, "attention_bias": True}),
    ],
)
def test_parameters_are_those_of_the_model_that_transformers_makes(family: str, more: dict, tied: bool) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {**SMALL, **more, "tie_word_embeddings": tied}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))
    assert shape({"model_type": family, **fields}).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.torch
@pytest.mark.parametrize("wide", [{}, {"intermediate_size": 960}, {"num_attention_heads": 24}, {"hidden_size": 384}])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_a_token_keeps_is_what_autograd_saves(family: str, wide: dict) -> None:
    """Of a layer, each storage once, parameters not; Llama has no norms of queries and keys, and keeps less."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokens = 128
    model_fields = {**SMALL, "hidden_size": 48, "intermediate_size": 112, "head_dim": 12, **wide}

    def saved(layers: int) -> float:
        fields = {**model_fields, "num_hidden_layers": layers}
        config = AutoConfig.for_model(family, **fields, attn_implementation="sdpa")
        model = AutoModelForCausalLM.from_config(config)
        parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.model(torch.zeros((1, tokens), dtype=torch.long))
        return sum(storage.nbytes() for storage in kept.values()) / 4 / tokens

    one = shape({"model_type": family, **model_fields, "num_hidden_layers": 1})
    a_layer = saved(3) - saved(2)
    assert 0.9 * a_layer < memory.activations(one) < (1.5 if family == "llama" else 1.2) * a_layer


def test_a_family_that_is_not_counted_and_a_field_that_is_none_are_named() -> None:
    with pytest.raises(ModelDirectoryError, match="model_type is 'gpt2'; memory and time are worked out for llama"):
        shape({**SMOLLM2, "model_type": "gpt2"})
    with pytest.raises(ModelDirectoryError, match="num_hidden_layers is 0; allowed are whole numbers from 1"):
        shape({**SMOLLM2, "num_hidden_layers": 0})


def test_memory_of_a_training_process_by_hand() -> None:
    small = shape({"model_type": "llama", **SMALL})
    alone = memory.train_cell(small, path_tokens=100, chunk=40, ranks=1, offload=False)
    assert (alone.weights, alone.gradients) == (small.parameters * 4, small.parameters * 4)
    # Keys and values of 3 layers, 2 heads of 8, in float32, and their gradients.
    assert alone.path == 100 * (2 * 3 * 2 * 8) * 8
    # Of a layer: 6 of 32 hidden, 4 of 32 queries, 4 of 16 keys, 4 of 48 in the MLP; 3 layers; 40 tokens of 4 bytes.
    graph = 40 * 3 * (6 * 32 + 4 * 32 + 4 * 16 + 4 * 48) * 4
    assert alone.chunk == graph + 3 * 4 * 40 * 64
    assert alone.total == alone.weights + alone.gradients + alone.path + alone.chunk
    apart = memory.train_cell(small, path_tokens=100, chunk=40, ranks=2, offload=True)
    assert apart.gradients == small.parameters * 2
    assert apart.total == apart.weights + apart.gradients + apart.chunk, "the path lies in main memory"


def test_the_longest_path_is_the_longest_that_fits() -> None:
    model = shape(QWEN3_8B)
    for gib in (45, 60, 80):
        longest = memory.longest_path(model, gib * GIB, chunk=2048, ranks=2, offload=False)
        fits = [
            memory.train_cell(model, path_tokens=tokens, chunk=2048, ranks=2, offload=False).total <= gib * GIB
            for tokens in (longest, longest + 1)
        ]
        assert fits == [True, False] or longest == model.context
    assert memory.longest_path(model, 8 * GIB, chunk=2048, ranks=2, offload=False) == 0


def test_memory_of_the_trainer() -> None:
    model = shape(SMOLLM2)
    assert memory.trainer(model, "adamw").total == model.parameters * (4 + 8 + 8)
    assert memory.trainer(model, "adafactor").total < model.parameters * 12.1


def spec(policy: str = "fine", **fields) -> RunSpec:
    return RunSpec(
        run="r", model="m", harness=Harness(max_turns=4, max_tokens=25, context_tokens=1000),
        dispatch=Dispatch(phi=0.0, mu=1, batch_groups=2, group_size=4), elastic=Elastic(policy=policy, **fields),  # type: ignore[arg-type]  # one of its values
    )  # fmt: skip


HARDWARE = Hardware(gpus=4, cell_gpus=2, gpu_gib=80, peak_tflops=100, train_tflops=50, memory_gb_s=1000)
MACHINE = machine_of(HARDWARE, cores=2, free_bytes=GIB)


def test_sampling_reads_the_weights_once_a_step_until_operations_bind() -> None:
    model = shape(SMOLLM2)
    one = tokens_per_s(model, MACHINE, 269_030_016, 2, 1, 500)
    step = (269_030_016 + 500 * 11_520 * 2) / (2000e9 * 0.5)
    assert one == pytest.approx(1 / step)
    many = tokens_per_s(model, MACHINE, 269_030_016, 2, 1_000_000, 0)
    assert many == pytest.approx(200e12 * 0.5 / model.forward_flops(0))
    assert tokens_per_s(model, MACHINE, 269_030_016, 2, 8, 500) > 4 * one


def test_time_of_an_update_by_hand() -> None:
    model = shape(SMOLLM2)
    fixed = times(spec("static", train_cells=1), model, MACHINE, weight_bytes=269_030_016, kv_width=2,
                  kv_tokens=1_000_000, capacity=16)  # fmt: skip
    assert load_of(spec()).sampled == 100
    assert (fixed.rollout_cells, fixed.train_cells, fixed.calls) == (1, 1, 8)
    flops = 2 * (model.matrices + 49152 * 576) + 4 * 30 * 9 * 64 * 500
    # Two groups share 900 tokens each, eight executions sample 100.
    unique = 2 * 900 + 8 * 100
    assert fixed.train_s == pytest.approx(unique * PASSES * flops / (100e12 * 0.3))
    assert fixed.train_unshared_s == pytest.approx(8 * 1000 * PASSES * flops / (100e12 * 0.3))
    assert fixed.rollout_s == pytest.approx(8 * 100 / fixed.tokens_per_s + unique * flops / (200e12 * 0.5))
    assert fixed.update_s == fixed.rollout_s + fixed.train_s, "with nothing in reserve one waits for the other"
    moving = times(spec(), model, MACHINE, weight_bytes=269_030_016, kv_width=2, kv_tokens=1_000_000, capacity=16)
    assert moving.switch_s == pytest.approx(2 * (269_030_016 / 2e9 + 1))
    assert moving.rollout_cells + moving.train_cells == pytest.approx(2)
    assert moving.update_s == pytest.approx(moving.rollout_s + moving.train_s + moving.switch_s)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"gpus": 8, "gpu": "X"}, "hardware.gpu is 'X'; allowed are A100-80GB"),
        ({"gpus": 8}, "hardware.gpu_gib is not set; it is needed, or a card by name"),
        ({"gpus": 8, "cell_gpus": 3, "gpu": "H100-80GB"}, "cell_gpus is 3; with 8 GPUs allowed are 1, 2, 4, 8"),
        ({"gpus": 8, "cell_gpus": 2, "cells": 5, "gpu": "H100-80GB"}, "8 GPUs make 4 cells of 2"),
    ],
)  # fmt: skip
def test_hardware_that_does_not_fit_is_refused_with_what_would(fields: dict, sentence: str) -> None:
    with pytest.raises(HardwareError) as refused:
        machine_of(Hardware(**fields), cores=2, free_bytes=GIB)
    assert sentence in str(refused.value)
