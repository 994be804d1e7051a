"""`gyre run` refuses what the stack that it runs on cannot do, before anything is submitted."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from opengyre.cli import run_fits
from opengyre.cli import stack as stacks
from opengyre.cli.fits import Room
from opengyre.cli.stack import Stack
from opengyre.cli.supervisor_plan import MARK
from opengyre.proto import subjects
from opengyre.proto.run import RunSpec
from opengyre.shared.bus import Bucket, Bus
from support.gateway_cli import Gyre, gyre_on

CONFIG = {
    "model_type": "qwen3", "vocab_size": 8, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 8192, "torch_dtype": "float32",
}  # fmt: skip
STAYS = "import sys; print(flush=True); sys.stdin.read()"


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


class Hosts:
    """Processes with the environment of a stack's hosts, in a folder of their own; they end with the test."""

    def __init__(self, gyre: Gyre, folder: Path) -> None:
        self._gyre = gyre
        self._folder = folder
        self._running: list[asyncio.subprocess.Process] = []

    async def start(self, many: int = 1, /, **settings: str) -> None:
        state = self._gyre.state
        environment = {"PATH": os.environ["PATH"], MARK: str(state.absolute()), **settings}
        for _ in range(many):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", STAYS, cwd=self._folder, env=environment,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            self._running.append(process)
            assert process.stdout is not None
            await asyncio.wait_for(process.stdout.readline(), 30)
        there = stacks.read(state)
        assert there is not None
        pids = {f"host{number}": process.pid for number, process in enumerate(self._running)}
        stacks.write(state, msgspec.structs.replace(there, processes={"gateway": os.getpid(), **pids}))

    async def end(self) -> None:
        for process in self._running:
            process.kill()
            await process.wait()

    @property
    def stack(self) -> Stack:
        there = stacks.read(self._gyre.state)
        assert there is not None
        return there


@pytest.fixture
async def gyre(bus: Bus, tmp_path: Path) -> AsyncIterator[Gyre]:
    async with gyre_on(bus, tmp_path) as made:
        yield made


@pytest.fixture
async def hosts(gyre: Gyre, tmp_path: Path) -> AsyncIterator[Hosts]:
    folder = tmp_path / "where-the-stack-was-started"
    folder.mkdir()
    made = Hosts(gyre, folder)
    try:
        yield made
    finally:
        await made.end()


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
    gyre: Gyre, bus: Bus, hosts: Hosts, tmp_path: Path, settings: dict[str, str], sentence: str
) -> None:
    recipe = write_recipe(tmp_path)
    await hosts.start(1, **{f"GYRE_HOST__{name}": value for name, value in {"ENGINE": "vllm", **settings}.items()})
    refusal = await gyre.refused("run", str(recipe), "--no-follow")
    assert refusal.startswith(f"{recipe}: ")
    assert sentence in refusal
    assert await Bucket(bus, subjects.KV_RUNS, RunSpec).get("shell") is None, "nothing was submitted"


async def test_a_real_run_asks_the_settings_file_that_the_hosts_read(
    gyre: Gyre, hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(tmp_path)
    (tmp_path / "gyre.toml").write_text("[host]\nvllm_context = 16\n")
    (tmp_path / "where-the-stack-was-started" / "gyre.toml").write_text("[host]\nvllm_context = 9000\n")
    monkeypatch.chdir(tmp_path)
    await hosts.start(GYRE_HOST__ENGINE="vllm")
    assert "host.vllm_context is 9000" in await gyre.refused("run", str(recipe), "--no-follow")
    (tmp_path / "where-the-stack-was-started" / "gyre.toml").unlink()
    found = run_fits.host_settings(hosts.stack)
    assert found is not None
    assert found.vllm_context == 2048, "a file where the run is asked for is not the stack's"


async def test_a_run_that_fits_the_stack_is_submitted_and_one_that_is_there_is_followed(
    gyre: Gyre, hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(tmp_path)
    await hosts.start(2, GYRE_HOST__ENGINE="vllm")
    room = Room(0, 2, 1 << 34, 1 << 34, more="gyre up --hosts")
    monkeypatch.setattr(run_fits, "_room", lambda *_: room)
    report = await gyre.json("run", str(recipe), "--no-follow")
    assert report["spec"]["run"] == "shell"
    small = Room(0, 2, 1 << 20, 1 << 20, more="gyre up --hosts")
    monkeypatch.setattr(run_fits, "_room", lambda *_: small)
    assert (await gyre.json("run", str(recipe), "--no-follow"))["spec"]["run"] == "shell"


async def test_memory_that_the_stack_holds_counts_as_free_for_its_run(gyre: Gyre, hosts: Hosts) -> None:
    assert run_fits.held(gyre.state) == 0
    await hosts.start()
    assert 1 << 20 < run_fits.held(gyre.state) < 1 << 30


async def test_of_a_stack_elsewhere_only_the_policys_positions_are_asked(gyre: Gyre, bus: Bus, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, max_position_embeddings=256)
    words = ("run", str(recipe), "--no-follow", "--gateway", gyre.running.url, "--api-key", "gyre_test")
    assert "context_tokens is 512; the policy has 256 positions" in await gyre.refused_plain(*words)
    assert await Bucket(bus, subjects.KV_RUNS, RunSpec).get("shell") is None


@pytest.mark.parametrize(("cells", "refused"), [(2, True), (3, False)])
async def test_a_split_that_leaves_no_cell_to_serve_is_refused_by_a_real_run(
    gyre: Gyre, hosts: Hosts, tmp_path: Path, cells: int, refused: bool
) -> None:
    recipe = write_recipe(tmp_path)
    recipe.write_text(f'{recipe.read_text()}[run.elastic]\npolicy = "static"\ntrain_cells = 2\n')
    await hosts.start(GYRE_HOST__ENGINE="emulated", GYRE_HOST__COUNT=str(cells))
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
