"""What cells hold of one machine's memory at once, against numbers worked out by hand."""

import pytest

from opengyre.cli.fits import Room, fitting, held
from opengyre.host.vllm_plan import OVERHEAD_BYTES, Facts
from opengyre.proto.run import Elastic, Harness, RunSpec
from opengyre.shared.settings import HostSettings
from opengyre.sizing import memory
from opengyre.sizing.hardware import GIB
from opengyre.sizing.shape import shape_of
from opengyre.tiny.config import ModelDirectoryError

SHAPE = shape_of(
    {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "config.json",
)  # fmt: skip
FACTS = Facts("model", 49152, 8192, 4 * SHAPE.parameters, SHAPE.kv_values, 9, "float32")
HOST = HostSettings(engine="vllm", vllm_kv_gb=4)
SWITCHING = Elastic(policy="fine")
STATIC = Elastic(policy="static", train_cells=1)


def spec(elastic: Elastic) -> RunSpec:
    return RunSpec(run="r", model="model", elastic=elastic, harness=Harness(context_tokens=1024))


@pytest.mark.parametrize(
    ("elastic", "cells", "wanted"),
    [
        (SWITCHING, 3, 3 * 5),  # all serve, as they do when a run begins
        (Elastic(policy="global"), 3, 3 * 5),
        (Elastic(policy="coarse", standalone_cells=1), 3, 3 * 5),
        (STATIC, 3, 2 * 5 + 2),
        (Elastic(policy="static", train_cells=7), 3, 5 + 2 * 2),  # one serves in any case
        (STATIC, 1, 5),  # a lone cell does both in turns, whatever the split
    ],
)
def test_cells_hold_what_they_can_hold_at_the_same_time(elastic: Elastic, cells: int, wanted: int) -> None:
    assert held(spec(elastic), cells, replica=5, training=2) == wanted


def test_cells_that_switch_count_with_their_training_where_that_takes_more() -> None:
    assert held(spec(SWITCHING), 3, replica=5, training=9) == 3 * 9
    assert held(spec(STATIC), 3, replica=5, training=9) == 2 * 5 + 9


def test_a_machine_that_holds_one_engine_beside_one_that_trains_is_not_refused() -> None:
    """Two engines were counted, though of a split that is kept one cell never starts one."""
    replica = FACTS.weight_bytes + 4 * GIB + OVERHEAD_BYTES
    training = memory.train_cell(SHAPE, path_tokens=1024, chunk=HOST.chunk, ranks=HOST.ranks, offload=False).total
    trainer = memory.trainer(SHAPE, "adamw").total
    free = replica + training + trainer
    assert training < replica

    def asked(elastic: Elastic, room: int, cells: int = 2) -> None:
        fitting(spec(elastic), FACTS, SHAPE, HOST, Room(0, cells, room, room, more="gyre up --hosts"))

    asked(STATIC, free)
    with pytest.raises(ModelDirectoryError, match=r"2 cells and the trainer need .*; gyre up --hosts 1 would do"):
        asked(STATIC, free - 1)
    with pytest.raises(ModelDirectoryError, match=r"2 cells and the trainer need .*; gyre up --hosts 1 would do"):
        asked(SWITCHING, free)
    with pytest.raises(ModelDirectoryError, match=r"3 cells and the trainer need .*; gyre up --hosts 2 would do"):
        asked(STATIC, free, cells=3)
    with pytest.raises(ModelDirectoryError, match=r"^a cell and the trainer need .* GiB of this machine's memory"):
        asked(STATIC, replica + trainer - 1)
