"""The verbs of `gyre` against a gateway and a NATS server that really run."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from opengyre.cli.main import app
from opengyre.cli.recipe import read_recipe
from opengyre.cli.stack import StackError
from opengyre.cli.task_files import batches, load_tasks
from opengyre.gateway import examples
from opengyre.proto import subjects
from opengyre.proto.base import Event
from opengyre.proto.host import HostState, HostStatus
from opengyre.proto.run import RunSpec
from opengyre.proto.task import GroupScored, TaskAdmitted, TaskSpec, TaskSubmitted
from opengyre.proto.update import Committed, UpdateStats
from opengyre.shared.bus import Bucket, Bus, read
from opengyre.tiny.tokenizer import TinyTokenizer
from support import eventually
from support.foreign_tasks import harbor
from support.gateway_cli import Gyre, gyre_on
from support.gateway_fakes import FakeAllocator


@pytest.fixture
async def gyre(bus: Bus, tmp_path: Path) -> AsyncIterator[Gyre]:
    async with gyre_on(bus, tmp_path) as made:
        yield made


async def run_there(gyre: Gyre) -> None:
    await gyre.running.given(201, "POST", "/v1/runs", examples.RUN_IN)
    await eventually(lambda: "demo" in gyre.running.gateway.deps.run_view.values)


EVALUATION = '[evaluation]\ngenerator = "shelltasks"\n'
TOML = """\
task = "from-toml"
instruction = "write hello into a"
[files]
"b/c.txt" = "x"
[[checks]]
name = "there"
command = "[ -f a ]"
weight = 1.0
"""


def write_tasks(folder: Path) -> None:
    folder.mkdir()
    (folder / "a.toml").write_text(TOML)
    (folder / "b.json").write_text(json.dumps([{**examples.TASK_IN, "task": "from-json"}]))
    lines = [json.dumps({**examples.TASK_IN, "task": f"line-{number}"}) for number in range(3)]
    (folder / "c.jsonl").write_text("\n".join(lines) + "\n\n")
    (folder / "notes.md").write_text("no task")


async def test_a_directory_of_tasks_is_submitted_in_order_and_read_again(gyre: Gyre, tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks")
    await run_there(gyre)
    reply = await gyre.json("task", "submit", str(tmp_path / "tasks"), "--run", "demo")
    names = ["from-toml", "from-json", "line-0", "line-1", "line-2"]
    assert [task["task"] for task in reply["tasks"]] == names
    assert "5 tasks are in run demo" in await gyre.shown("task", "submit", str(tmp_path / "tasks"))
    assert [task["task"] for task in (await gyre.json("task", "ls"))["tasks"]] == names
    assert "from-toml" in await gyre.shown("task", "ls", "--state", "submitted")
    assert "[ -f a ]" in await gyre.shown("task", "show", "from-toml")
    assert (await gyre.json("task", "show", "line-1", "--run", "demo"))["spec"]["task"] == "line-1"
    assert "no task nope in run demo" in await gyre.refused("task", "show", "nope")


async def test_the_network_of_a_task_comes_through_the_gateway(gyre: Gyre, tmp_path: Path) -> None:
    """The API refused it as a field that it does not know, and with it each directory of Harbor."""
    toml = (
        'schema_version = "1.4"\n[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["*.a.org", "10.0.0.1"]\n'
    )
    task = harbor(tmp_path / "listed", task_DOT_toml=toml)
    await run_there(gyre)
    await gyre.json("task", "submit", str(task), "--run", "demo")
    environment = (await gyre.json("task", "show", "listed", "--run", "demo"))["spec"]["environment"]
    assert (environment["network"], environment["allowed_hosts"]) == ("allowlist", ["*.a.org", "10.0.0.1"])


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.toml", TOML.replace("1.0", "0.5"), r"a\.toml: checks have weights that sum to 0\.5"),
        ("a.toml", TOML.replace("weight", "wieght"), r"a\.toml: unknown field checks\.0\.wieght; allowed here: name"),
        ("a.toml", "task = ", r"a\.toml is not valid TOML"),
        ("a.json", '{"task": 1}', r"a\.json: Expected `str`, got `int`"),
        ("a.jsonl", f"{json.dumps(examples.TASK_IN)}\n{{", r"a\.jsonl: line 2 is not valid JSON"),
        ("a.jsonl", f"{json.dumps(examples.TASK_IN)}\n" * 2, r"line 2: task 'write-000001' is in .*line 1 already"),
        ("a.json", "[]", "holds no tasks"),
        ("a.json", "3", "a task is an object with the fields task, instruction"),
        ("a.txt", "", r"is no task file; allowed are \.toml"),
    ],
)
def test_a_bad_task_file_is_one_sentence_that_names_file_and_field(
    tmp_path: Path, name: str, text: str, sentence: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(StackError, match=sentence):
        load_tasks(tmp_path / name)


def test_batches_keep_the_order_and_their_bounds() -> None:
    tasks = [TaskSpec(task=f"t{number}", instruction="x" * 3000) for number in range(1200)]
    cut = list(batches(tasks))
    assert [task for batch in cut for task in batch] == tasks
    assert max(len(batch) for batch in cut) <= 500
    assert max(len(msgspec.json.encode(batch)) for batch in cut) < (2 << 20) + 10_000


async def test_hosts_wishes_staleness_and_status(gyre: Gyre, bus: Bus) -> None:
    await run_there(gyre)
    status = HostStatus(
        host="host0", cell="host0", boot="b", state=HostState.ROLLOUT, epoch=1, url="http://x", engine="tiny"
    )
    await Bucket(bus, subjects.KV_HOSTS, HostStatus).put("host0", status, ttl_s=60)
    await eventually(lambda: "host0" in gyre.running.gateway.deps.host_view.values)
    async with FakeAllocator("demo").answering(bus) as allocator:
        assert "host0" in await gyre.shown("hosts")
        assert "cell host0: drain is asked for; its state is " in await gyre.shown("drain", "host0")
        allocator.wishes.clear()
        for wish in ("drain", "resume", "cordon"):
            assert (await gyre.json(wish, "host0"))["wish"] == wish
        assert [one.wish for one in allocator.wishes] == ["drain", "resume", "cordon"]
        assert "there is no cell c9" in await gyre.refused("drain", "c9")
        assert "cell 'a/b' is not allowed" in await gyre.refused("drain", "a/b")
        assert (await gyre.json("staleness", "demo"))["predicted"] == 1.0
        assert "predicted 1.00, measured 1.10" in await gyre.shown("staleness")
        assert "there is no run nope; there are: demo" in await gyre.refused("staleness", "nope")
        assert "rollout is missing" in await gyre.shown("status", code=1)
        assert (await gyre.json("status", code=1))["run"]["spec"]["run"] == "demo"


async def test_without_a_stack_or_a_gateway_one_sentence_says_so(gyre: Gyre, tmp_path: Path) -> None:
    empty = await asyncio.to_thread(CliRunner().invoke, app, ["status", "--state-dir", str(tmp_path / "none")])
    assert "there is no stack in" in str(empty.exception)
    assert "does not answer" in await gyre.refused("status", "--gateway", "http://127.0.0.1:9")
    assert "allowed is a URL" in await gyre.refused("status", "--gateway", "nonsense")
    assert "API key" in await gyre.refused("status", "--gateway", gyre.running.url, "--api-key", "wrong")
    words = [sys.executable, "-m", "opengyre.cli", "status", "--state-dir", str(tmp_path / "none")]
    done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, timeout=150)
    assert done.returncode == 1
    assert done.stderr.startswith("gyre: there is no stack in")
    assert done.stderr.count("\n") == 1


def write_model(directory: Path) -> None:
    """What a dry run looks at of a policy, with no weights to speak of."""
    directory.mkdir(exist_ok=True)
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    (directory / "config.json").write_text('{"model_type": "llama", "vocab_size": 8}')
    (directory / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 7}}}')
    (directory / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')


def write_recipe(folder: Path, tasks: str = 'generator = "shelltasks"\ncount = 6\nseed = 3') -> Path:
    write_model(folder / "model")
    recipe = folder / "recipe.toml"
    recipe.write_text(
        f'[run]\nrun = "shell"\nmodel = "model"\nupdates = 2\n[run.dispatch]\nbatch_groups = 2\n[tasks]\n{tasks}\n'
    )
    return recipe


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("config.json", None, "config.json does not exist"),
        ("config.json", b"{", "config.json is not readable JSON"),
        ("config.json", b'{"model_type": "llama", "vocab_size": "8"}', "vocab_size is '8'; allowed are whole numbers"),
        ("config.json", b'{"model_type": "llama", "vocab_size": 7}', "the tokenizer has the id 7"),
        ("model.safetensors", None, "model.safetensors does not exist"),
        ("model.safetensors", b"none", "model.safetensors is not a safetensors file"),
        ("model.safetensors", b"\x02" + bytes(7) + b"{}x", "model.safetensors has 11 bytes; its header says 10"),
        ("tokenizer.json", None, "tokenizer.json does not exist"),
        ("tokenizer.json", b"[]", "tokenizer.json holds a list"),
        ("tokenizer.json", b"{}", "tokenizer.json: the tokenizer has no ids; allowed is one whose model has a"),
        ("chat_template.jinja", b"{% if %}", "chat_template.jinja: the chat template cannot be parsed: line 1: "),
        ("tokenizer_config.json", b'{"chat_template": "{{"}', "tokenizer_config.json: the chat template cannot be"),
        ("config.json", b'{"model_type": "mistral"}', "model_type is 'mistral', which cannot be trained exactly; "),
    ],
)
def test_a_dry_run_refuses_a_model_directory_that_cannot_be_used(
    tmp_path: Path, name: str, content: bytes | None, sentence: str
) -> None:
    recipe = write_recipe(tmp_path)
    path = tmp_path / "model" / name
    path.unlink() if content is None else path.write_bytes(content)
    done = CliRunner().invoke(app, ["run", str(recipe), "--dry-run"])
    assert done.exit_code == 1
    assert f"{recipe}: run.model cannot be used: " in str(done.exception)
    assert sentence in str(done.exception)


async def test_a_chat_with_a_model_without_a_chat_template_is_refused(gyre: Gyre, bus: Bus, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    (tmp_path / "model" / "tokenizer_config.json").unlink()
    for options in (("--no-follow",), ("--dry-run",)):
        refusal = await gyre.refused("run", str(recipe), *options)
        assert "run.harness.prompt is chat, and the model in" in refusal
        assert 'allowed is prompt = "transcript", or a model with chat_template' in refusal
    assert await Bucket(bus, subjects.KV_RUNS, RunSpec).get("shell") is None, "nothing was submitted"
    recipe.write_text(f'{recipe.read_text()}[run.harness]\nprompt = "transcript"\n')
    assert "the recipe is valid" in await gyre.shown("run", str(recipe), "--dry-run")


@pytest.mark.parametrize("prompt", ["chat", "transcript"])
async def test_a_context_that_the_prompt_exceeds_is_refused(gyre: Gyre, bus: Bus, tmp_path: Path, prompt: str) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for name, words in (("a", 30), ("b", 60)):
        (tasks / f"{name}.json").write_text(
            json.dumps({**examples.TASK_IN, "task": name, "instruction": "abc " * words})
        )
    recipe = write_recipe(tmp_path, 'path = "tasks"')
    model = tmp_path / "model"
    (model / "config.json").write_text('{"model_type": "llama", "vocab_size": 300}')
    TinyTokenizer.train(["abc"], 262).save(model)
    text = recipe.read_text()

    def within(context: int) -> None:
        recipe.write_text(f'{text}[run.harness]\nprompt = "{prompt}"\ncontext_tokens = {context}\nmax_tokens = 1\n')

    within(8)
    refusal = await gyre.refused("run", str(recipe), "--dry-run")
    assert "run.harness.context_tokens is 8; the shortest prompt has " in refusal
    assert await gyre.refused("run", str(recipe), "--no-follow") == refusal
    assert await Bucket(bus, subjects.KV_RUNS, RunSpec).get("shell") is None, "nothing was submitted"
    least = int(refusal.rpartition(" ")[2])
    within(least - 1)
    assert await gyre.refused("run", str(recipe), "--dry-run")
    within(least)
    facts = await gyre.json("run", str(recipe), "--dry-run")
    assert f"run.harness.context_tokens is {least} and the longest prompt has " in facts["notes"][0]
    within(512)
    assert (await gyre.json("run", str(recipe), "--dry-run"))["notes"] == []


async def test_a_dry_run_with_too_few_tasks_is_valid_and_says_so(gyre: Gyre, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, 'generator = "shelltasks"\ncount = 1')
    said = await gyre.shown("run", str(recipe), "--dry-run")
    assert "the tasks make 1 groups and the updates take 4: the run waits for more tasks then" in said
    assert said.endswith("the recipe is valid; nothing was started\n")


async def test_a_recipe_is_run_and_followed_until_it_is_finished(gyre: Gyre, bus: Bus, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    facts = await gyre.json("run", str(recipe), "--dry-run")
    assert (facts["tasks"], facts["groups"], facts["groups_needed"]) == (6, 6, 4)
    assert facts["run"]["model"] == str(tmp_path / "model")
    assert await Bucket(bus, subjects.KV_RUNS, RunSpec).get("shell") is None, "a dry run starts nothing"

    following = asyncio.create_task(gyre.lines("run", str(recipe)))
    runs = Bucket(bus, subjects.KV_RUNS, RunSpec)

    async def submitted() -> bool:
        return len(await bus.subjects(subjects.TASKS, subjects.task("shell", "*", "submitted"))) == 6

    await eventually(submitted)
    for update in (1, 2):
        event = Committed(
            run="shell", update=update, attempt="a", version=update, published=True, groups=(), executions=(),
            staleness=(1,), score=update / 2, gradient_norm=1.0, stats=UpdateStats(),
        )  # fmt: skip
        await bus.publish(subjects.update("shell", "committed"), event)
    found = await runs.get("shell")
    assert found is not None
    await runs.update("shell", msgspec.structs.replace(found[0], state="finished"), found[1])
    async with asyncio.timeout(90):
        updates = await following
    assert [(update["update"], update["score"]) for update in updates] == [(1, 0.5), (2, 1.0)]


async def test_a_followed_run_ends_with_the_evaluation_of_its_last_policy(gyre: Gyre, bus: Bus, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    recipe.write_text(f"{recipe.read_text()}{EVALUATION}count = 2\n")
    facts = await gyre.json("run", str(recipe), "--dry-run")
    assert (facts["evaluations"], facts["evaluated_versions"]) == (4, [0, 2])
    assert "2 held-out tasks evaluate each of the versions 0, 2" in await gyre.shown("run", str(recipe), "--dry-run")
    names = [task.task for task in read_recipe(recipe).evaluation]
    following = asyncio.create_task(gyre.lines("run", str(recipe)))
    runs = Bucket(bus, subjects.KV_RUNS, RunSpec)

    async def submitted() -> bool:
        return len(await bus.subjects(subjects.TASKS, subjects.task("shell", "*", "submitted"))) == 10

    async def evaluate(name: str, version: int, score: float) -> None:
        for event in evaluation(name, f"shell-g{names.index(name):06d}", version, score):
            kind = "admitted" if isinstance(event, TaskAdmitted) else "scored"
            await bus.publish(subjects.task("shell", name, kind), event)

    await eventually(submitted)
    first = (await read(bus, subjects.TASKS, subjects.task("shell", "*", "submitted")))[0].event()
    assert isinstance(first, TaskSubmitted)
    assert first.task == names[0], "the first policy is evaluated before it is trained"
    await evaluate(names[0], 0, 0.0)
    await evaluate(names[1], 0, 0.5)
    found = await runs.get("shell")
    assert found is not None
    await runs.update("shell", msgspec.structs.replace(found[0], state="finished"), found[1])
    await evaluate(names[2], 2, 1.0)
    await evaluate(names[3], 2, 0.5)
    async with asyncio.timeout(90):
        lines = await following
    assert lines == [
        {"evaluated_version": 0, "score": 0.25, "tasks": 2},
        {"evaluated_version": 2, "score": 0.75, "tasks": 2},
    ]
    shown = await gyre.json("run", "show", "shell")
    assert [(one["version"], one["score"]) for one in shown["evaluations"]] == [(0, 0.25), (2, 0.75)]
    assert "held-out tasks of each version: 2" in await gyre.shown("run", "show", "shell")
    table = await gyre.shown("run", "show", "shell", "--markdown")
    assert "| version | score | solved | write | rename |" in table
    assert "| 2 | 0.750 | 1 | 1.00 | 0.50 |" in table
    assert await gyre.refused("run", "show", "other") == "there is no run other; there are: shell"


def evaluation(name: str, group: str, version: int, score: float) -> tuple[Event, Event]:
    member = f"{group}-e00"
    scored = GroupScored(
        run="shell", task=name, group=group, outcome="evaluated", scores={member: score}, sampled_version_min=version,
        sampled_version_max=version, tokens=1,
    )  # fmt: skip
    return TaskAdmitted(run="shell", task=name, group=group, executions=(member,), version=version), scored


@pytest.mark.parametrize(("turns", "said"), [(40, True), (4, False)])
async def test_a_dry_run_says_that_tasks_turns_go_before_the_harness(
    gyre: Gyre, tmp_path: Path, turns: int, said: bool
) -> None:
    recipe = write_recipe(tmp_path)
    recipe.write_text(recipe.read_text() + f"[run.harness]\nmax_turns = {turns}\n")
    line = f"6 tasks say max_turns = 4 themselves, which holds for them; run.harness.max_turns = {turns} does not"
    assert (line in await gyre.shown("run", str(recipe), "--dry-run")) is said
    assert (await gyre.json("run", str(recipe), "--dry-run"))["own_turns"] == ({"4": 6} if said else {})


async def test_a_run_can_be_started_without_following_it(gyre: Gyre, tmp_path: Path) -> None:
    report = await gyre.json("run", str(write_recipe(tmp_path)), "--no-follow")
    assert (report["spec"]["run"], report["spec"]["state"]) == ("shell", "active")


def test_a_recipe_evaluates_the_first_policy_the_last_one_and_some_between(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    text = recipe.read_text().replace("updates = 2", "updates = 7")
    recipe.write_text(f"{text}\n{EVALUATION}count = 2\nevery = 3\n")
    plan = read_recipe(recipe)
    assert plan.evaluated_versions == (0, 3, 6, 7)
    assert [(task.purpose, task.from_version) for task in plan.evaluation[2:5]] == [("evaluate", 3)] * 2 + [
        ("evaluate", 6)
    ]
    assert len({task.task for task in plan.evaluation}) == 8
    assert {task.instruction for task in plan.evaluation[:2]} == {task.instruction for task in plan.evaluation[6:]}
    assert plan.groups == len(plan.tasks), "they are no groups to train"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("[tasks]", "[task]"), "unknown table task; allowed: run, tasks"),
        (("[tasks]", "[harness]\nmax_turns = 9\n[tasks]"), r"unknown table harness; did you mean run\.harness\?"),
        (("updates", "update"), r"unknown field run\.update; allowed here: run, model"),
        (("batch_groups", "groups"), r"unknown field run\.dispatch\.groups; allowed here: phi"),
        (("updates = 2", "updates = 0"), r"run\.updates is 0; allowed are values from 1"),
        (("updates = 2", "updates = -1"), r"run\.updates is -1; allowed are values from 1"),
        (("updates = 2", "updates = '2'"), r"run\.updates is '2'; allowed: a whole number$"),
        (('run = "shell"\n', ""), r"run\.run is missing; allowed: text$"),
        (('"shell"\n', '"she-ll"\n'), r"run\.run 'she-ll' is not allowed"),
        (
            ("[tasks]", "[run.harness.branching]\n[tasks]"),
            r"run\.harness\.branching\.turn is missing; allowed: a whole",
        ),
        (
            ("[tasks]", "[[run.harness.shots]]\ntask = 3\n[tasks]"),
            r"run\.harness\.shots\[0\]\.task is 3; allowed: text$",
        ),
        (("count = 6", "count = 'x'"), r"tasks\.count is 'x'; allowed: a whole number$"),
        (('"shelltasks"', '"bla"'), r"tasks\.generator is 'bla'; allowed is 'shelltasks'"),
        (('"model"', '"absent"'), r"run\.model is 'absent' and .* is no directory"),
        (('generator = "shelltasks"', ""), "either path or generator"),
        (("count = 6", "count = 0"), r"tasks\.count is 0; allowed"),
        (("[run]", "[run"), "is not valid TOML"),
        (("[tasks]", "[evaluation]\n[tasks]"), r"\[evaluation\] names either path or generator"),
        (("[tasks]", f"{EVALUATION}every = 3\n[tasks]"), r"evaluation\.every is 3; allowed are values from 1 to 2"),
        (("[tasks]", f"{EVALUATION}each = 3\n[tasks]"), r"unknown field evaluation\.each; allowed here: path"),
    ],
)
def test_a_bad_recipe_is_one_sentence(tmp_path: Path, change: tuple[str, str], sentence: str) -> None:
    recipe = write_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace(*change, 1))
    with pytest.raises(StackError, match=sentence):
        read_recipe(recipe)
