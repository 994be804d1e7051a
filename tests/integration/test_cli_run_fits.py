"""`gyre run` refuses what the stack that it runs on cannot do, before anything is submitted."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from opengyre.cli import run_fits
from opengyre.cli import stack as stacks
from opengyre.cli.fits import Room
from opengyre.cli.supervisor_plan import MARK
from opengyre.cli.up import Options, compose
from opengyre.proto import subjects
from opengyre.proto.run import RunSpec
from opengyre.shared.bus import Bucket, Bus
from opengyre.shared.settings import HostSettings, load
from support.gateway_cli import Gyre, gyre_on

CONFIG = {
    "model_type": "qwen3", "vocab_size": 8, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 8192, "torch_dtype": "float32",
}  # fmt: skip


def write_recipe(folder: Path, **changes: object) -> Path:
    model = folder / "model"
    model.mkdir()
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    (model / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    (model / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 7}}}')
    (model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    recipe = folder / "recipe.toml"
    recipe.write_text(
        '[run]\nrun = "shell"\nmodel = "model"\nupdates = 2\n[run.dispatch]\nbatch_groups = 2\n'
        '[tasks]\ngenerator = "shelltasks"\ncount = 6\n'
    )
    return recipe


def hosts(gyre: Gyre, many: int, /, **settings: str) -> None:
    """Have the stack say that it has so many hosts with these settings."""
    there = stacks.read(gyre.state)
    assert there is not None
    host = load(Path(os.devnull), {f"GYRE_HOST__{name}": value for name, value in settings.items()}).host
    stacks.write(gyre.state, msgspec.structs.replace(there, cells=many, host=host.model_dump(mode="json")))


@pytest.fixture
async def gyre(bus: Bus, tmp_path: Path) -> AsyncIterator[Gyre]:
    async with gyre_on(bus, tmp_path) as made:
        yield made


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"VLLM_CONTEXT": "100000"}, "host.vllm_context is 100000; the model in "),
        ({"VLLM_CONTEXT": "256"}, "run.harness.context_tokens is 512, and host.vllm_context is 256"),
        ({"VLLM_TENSOR_PARALLEL": "3"}, "host.vllm_tensor_parallel is 3; with 4 attention heads allowed are 1, 2, 4"),
        ({"VLLM_KV_GB": "999999"}, "host.vllm_kv_gb is 999999: beside"),
        ({"ENGINE": "tiny"}, "which the stack's hosts cannot serve by the tiny engine"),
    ],
)
async def test_a_real_run_refuses_what_a_dry_run_refuses(
    gyre: Gyre, bus: Bus, tmp_path: Path, settings: dict[str, str], sentence: str
) -> None:
    recipe = write_recipe(tmp_path)
    hosts(gyre, 1, **{"ENGINE": "vllm", **settings})
    refusal = await gyre.refused("run", str(recipe), "--no-follow")
    assert refusal.startswith(f"{recipe}: ")
    assert sentence in refusal
    assert await Bucket(bus, subjects.KV_RUNS, RunSpec).get("shell") is None, "nothing was submitted"


@pytest.fixture
def running(gyre: Gyre) -> Iterator[Gyre]:
    """The stack's supervisor is this process."""
    there = stacks.read(gyre.state)
    assert there is not None
    stacks.write(gyre.state, msgspec.structs.replace(there, supervisor_pid=os.getpid()))
    with stacks.Lock(gyre.state):
        yield gyre


async def test_a_dry_run_looks_at_the_hosts_of_the_stack_that_runs(
    running: Gyre, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opengyre.cli.estimate.free_memory", lambda: 32 << 30)
    monkeypatch.setattr("opengyre.cli.run_fits.free_memory", lambda: 32 << 30)
    monkeypatch.setenv("GYRE_HOST__VLLM_CONTEXT", "256")
    recipe = write_recipe(tmp_path)
    hosts(running, 3, ENGINE="vllm", VLLM_KV_GB="1", VLLM_CONTEXT="4096")
    facts = await running.json("run", str(recipe), "--dry-run")
    found = facts["estimate"]
    assert facts["stack"] == str(running.state)
    assert (found["serving"]["engine"], found["serving"]["kv"]) == ("vllm", 1 << 30)
    assert found["hardware"].endswith("cores, 3 cells share them")
    said = f"hosts: the 3 of the stack in {running.state}, as they were started\n"
    assert said in await running.shown("run", str(recipe), "--dry-run")
    hosts(running, 3, ENGINE="vllm", VLLM_CONTEXT="300")
    assert "host.vllm_context is 300" in await running.refused("run", str(recipe), "--dry-run")
    hosts(running, 3, ENGINE="emulated")
    facts = await running.json("run", str(recipe), "--dry-run")
    assert (facts["stack"], facts["estimate"]) == (str(running.state), None), "they have no model"


@pytest.mark.parametrize("why", ["stopped", "elsewhere", "hardware"])
async def test_a_dry_run_without_a_stack_here_goes_by_the_settings(
    running: Gyre, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr("opengyre.cli.estimate.free_memory", lambda: 32 << 30)
    recipe = write_recipe(tmp_path)
    words = ["run", str(recipe), "--dry-run"]
    hosts(running, 1, ENGINE="vllm", VLLM_CONTEXT="300")
    if why == "stopped":
        there = stacks.read(running.state)
        assert there is not None
        stacks.write(running.state, msgspec.structs.replace(there, supervisor_pid=0))
    elif why == "elsewhere":
        words += ["--gateway", running.running.url]
    else:
        recipe.write_text(f"{recipe.read_text()}[hardware]\nhost_gib = 64.0\n")
    facts = await running.json(*words)
    assert (facts["stack"], facts["model_is_here"]) == (None, True)
    assert "hosts: by the settings in force here\n" in await running.shown(*words)


def test_a_stack_says_what_its_hosts_are_started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file where it is started, what the environment says, and what `gyre up` itself sets."""
    (tmp_path / "gyre.toml").write_text("[host]\nchunk = 77\nvllm_context = 9000\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GYRE_HOST__VLLM_CONTEXT", "4000")
    options = Options(tmp_path / "state", hosts=3, engine="emulated", environment={"GYRE_HOST__CAPACITY": "5"})
    stack, _, _ = compose(options, load())
    assert stack.cells == 3
    assert stack.host is not None
    host = HostSettings.model_validate(stack.host)
    assert (host.engine, host.chunk, host.vllm_context, host.capacity) == ("emulated", 77, 4000, 5)


async def test_a_run_that_fits_the_stack_is_submitted_and_one_that_is_there_is_followed(
    gyre: Gyre, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(tmp_path)
    hosts(gyre, 2, ENGINE="vllm")
    room = Room(0, 2, 1 << 34, 1 << 34, more="gyre up --hosts")
    monkeypatch.setattr(run_fits, "_room", lambda *_: room)
    report = await gyre.json("run", str(recipe), "--no-follow")
    assert report["spec"]["run"] == "shell"
    small = Room(0, 2, 1 << 20, 1 << 20, more="gyre up --hosts")
    monkeypatch.setattr(run_fits, "_room", lambda *_: small)
    assert (await gyre.json("run", str(recipe), "--no-follow"))["spec"]["run"] == "shell"


async def test_memory_that_the_stack_holds_counts_as_free_for_its_run(tmp_path: Path) -> None:
    assert run_fits.held(tmp_path) == 0
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()", env={MARK: str(tmp_path)},
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        await asyncio.wait_for(process.stdout.readline(), 30)
        assert 1 << 20 < run_fits.held(tmp_path) < 1 << 30
    finally:
        process.kill()
        await process.wait()


async def test_of_a_stack_elsewhere_only_the_policys_positions_are_asked(gyre: Gyre, bus: Bus, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, max_position_embeddings=256)
    words = ("run", str(recipe), "--no-follow", "--gateway", gyre.running.url, "--api-key", "gyre_test")
    assert "context_tokens is 512; the policy has 256 positions" in await gyre.refused_plain(*words)
    assert await Bucket(bus, subjects.KV_RUNS, RunSpec).get("shell") is None


@pytest.mark.parametrize(("cells", "refused"), [(2, True), (3, False)])
async def test_a_split_that_leaves_no_cell_to_serve_is_refused_by_a_real_run(
    gyre: Gyre, tmp_path: Path, cells: int, refused: bool
) -> None:
    recipe = write_recipe(tmp_path)
    recipe.write_text(f'{recipe.read_text()}[run.elastic]\npolicy = "static"\ntrain_cells = 2\n')
    hosts(gyre, cells, ENGINE="emulated")
    if refused:
        said = "run.elastic.train_cells is 2 and one at least has to serve, 3 together, but there are 2 cells"
        assert said in await gyre.refused("run", str(recipe), "--no-follow")
    else:
        assert (await gyre.json("run", str(recipe), "--no-follow"))["spec"]["run"] == "shell"


async def test_a_dry_run_says_that_a_split_needs_more_cells_than_are_assumed(
    gyre: Gyre, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opengyre.cli.estimate.free_memory", lambda: 16 << 30)
    recipe = write_recipe(tmp_path)
    recipe.write_text(f'{recipe.read_text()}[run.elastic]\npolicy = "static"\ntrain_cells = 2\n')
    facts = await gyre.json("run", str(recipe), "--dry-run")
    (note,) = facts["estimate"]["notes"]
    assert note.startswith(
        "run.elastic.train_cells is 2 and one at least has to serve, 3 together, but there are 2 cells"
    )
    assert note.endswith(", of the cells that are assumed here; a stack needs more")
