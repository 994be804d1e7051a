"""vLLM behind the services: unmodified agents through the recording proxy; roles, and the death of engines, mid-call.

Two hosts, started once under the supervisor, as `gyre up` starts them.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from transformers import PreTrainedTokenizerFast

from opengyre.chat import hermes
from opengyre.chat.hf import HfRenderer
from opengyre.proto import subjects
from opengyre.proto.host import HostState, HostStatus
from opengyre.proto.service import ServiceStatus
from opengyre.proto.task import Check, TaskSpec
from opengyre.proto.traj import Call, Ended, Resumed, Suspended, Verified
from opengyre.sandbox import machine
from opengyre.shared import metrics
from opengyre.shared.bus import Bucket
from opengyre.tiny.model import TinyModel
from support import eventually
from support.mini_swe_agent import CONFIG, LINE, PLACE, SUBMIT, installed
from support.processes import process
from support.rollout_fakes import dispatch
from support.vllm_policy import BASH, CONTEXT, Shown, call, in_bytes, logprobs, noise, tokenizer_of, told
from support.vllm_stack import HOSTS, Heard, VllmStack, tree_of, vllm_stack, whole_prompts

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900), pytest.mark.torch, pytest.mark.slow
]  # fmt: skip

NEAR = 2e-5
LONG = 5000
"""Tokens of a call that is still under way when the second host has been drained or killed as well."""
INSTRUCTION = "write one into a.txt"
SOLVES = "echo one > a.txt"
TALK = Shown(INSTRUCTION, (call(SOLVES), call(SUBMIT), "It is done."), ("", "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n"))
USER: list[Any] = [{"role": "system", "content": TALK.system}, {"role": "user", "content": INSTRUCTION}]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmStack]:
    folder = tmp_path_factory.mktemp("services")
    directory = folder / "policy"
    directory.mkdir()
    renderer = await asyncio.to_thread(tokenizer_of, directory, [TALK])
    models = {"told": await asyncio.to_thread(told, renderer, [TALK]), "noise": noise(renderer)}
    async with vllm_stack(folder, directory, models) as made:
        yield made


def off(model: TinyModel, prompt: tuple[int, ...], made: Call) -> float:
    """By how much recorded log-probs differ from a forward over the recorded ids, at most."""
    expected = logprobs(model, (*prompt, *made.sampled_ids))[len(prompt) - 1 :]
    return max(abs(a - b) for a, b in zip(made.logprobs, expected, strict=True))


async def test_the_stock_client_loops_with_tools_and_streams_and_no_token_is_encoded_twice(stack: VllmStack) -> None:
    model = await stack.serve("told")
    tools: list[Any] = [{"type": "function", "function": BASH}]
    talk = list(USER)
    heard: list[Heard] = []
    async with stack.playing() as (agent, _):
        force: dict[str, Any] = {"tool_choice": {"type": "function", "function": {"name": "bash"}}}
        while not heard or heard[-1].calls:
            assert len(heard) < 5, heard
            heard.append(await agent.ask(talk, tools=tools, **(force if not heard else {})))
            talk.append(heard[-1].message)
            for one, answer in zip(heard[-1].calls.values(), TALK.answers[len(heard) - 1 :], strict=False):
                talk.append({"role": "tool", "tool_call_id": one["id"], "content": answer})
        calls = await agent.calls()

    assert [one.finish for one in heard] == ["tool_calls", "tool_calls", "stop"]
    for one, made in zip(heard, calls, strict=True):
        assert one.text == (made.text if made.content is None else made.content), "streamed as it is recorded"
        assert [(c["id"], c["name"], c["arguments"]) for c in one.calls.values()] == [
            (tool.id, tool.name, tool.arguments) for tool in made.tool_calls
        ]
    assert [one.text for one in calls] == list(TALK.turns)
    assert [one.forced > 0 for one in calls] == [True, False, False]

    renderer = HfRenderer.load(stack.model)
    prompts = whole_prompts(calls)
    for before, made, after, prompt in zip(prompts, calls, calls[1:], prompts[1:], strict=False):
        assert (after.parent, after.transition) == (made.call, "extend")
        assert prompt[: len(before) + len(made.sampled_ids)] == (*before, *made.sampled_ids)
    opening = calls[0].prompt_ids[len(calls[0].prompt_ids) - calls[0].forced :]
    for made, begun in zip(calls, (opening, (), ()), strict=True):
        said = made.text[len(renderer.decode(begun)) :]
        ended = () if begun else renderer.stop_token_ids[:1]  # a forced call ends the turn where it ends
        assert made.sampled_ids == (*in_bytes(renderer, said), *ended)
        assert (*renderer.encode(said), *ended) != made.sampled_ids, "encoded again it would be other tokens"

    theirs = PreTrainedTokenizerFast.from_pretrained(stack.model)
    system = {"role": "system", "content": f"{TALK.system}\n\n{hermes.prompt_of([BASH])}"}
    first = theirs.apply_chat_template([system, USER[1]], add_generation_prompt=True, return_dict=False)
    assert list(prompts[0]) == [*first, *opening], "the template's own rendering, once"
    start = theirs.convert_tokens_to_ids("<|im_start|>")
    assert [made.prompt_ids.count(start) for made in calls] == [3, 2, 2], "a header each new message, and its turn's"
    written = [system, USER[1]]
    for turn, answer in zip(TALK.turns, TALK.answers, strict=False):
        written += [{"role": "assistant", "content": turn}, {"role": "tool", "content": answer}]
    assert theirs.decode(list(prompts[-1])) == theirs.apply_chat_template(
        written, add_generation_prompt=True, tokenize=False
    )

    assert max(off(model, prompt, made) for prompt, made in zip(prompts, calls, strict=True)) < NEAR
    tree = tree_of(calls).figures
    assert (tree.calls, tree.leaves, tree.unique_nodes) == (3, 1, len(prompts[-1]) + len(calls[-1].sampled_ids))


@pytest.mark.sandbox
@pytest.mark.skipif(
    machine.find_bwrap() is None or machine.user_namespaces() is not None, reason="needs bubblewrap and user namespaces"
)
async def test_mini_swe_agent_as_it_is_solves_a_task_in_its_sandbox(stack: VllmStack) -> None:
    agents = await asyncio.to_thread(installed)
    model = await stack.serve("told")
    check = Check(name="one", command='[ "$(cat a.txt)" = one ]', weight=1.0)
    task = TaskSpec(task="one", instruction=INSTRUCTION, files={"mini.yaml": CONFIG}, checks=(check,))
    plain = dispatch(
        number=1000, agent="program", program=LINE, max_turns=8, max_tokens=200, context_tokens=CONTEXT,
        time_budget_s=240.0,
    )  # fmt: skip
    episode = msgspec.structs.replace(plain, task=task)
    bound = {"SANDBOX__BINDS": f"{PLACE}={agents}", "SANDBOX__MEMORY_MB": "1024"}
    with process(stack, "sandbox", **bound) as node:
        async with Bucket(stack.bus, subjects.KV_SERVICES, ServiceStatus).view() as services:
            await eventually(lambda: node.pid in {one.pid for one in services.values.values() if one.ready}, 120)
        async with stack.service("mini"):
            await stack.submit(episode)
            await eventually(lambda: stack.ended(episode), 300)
    events = await stack.log(episode)
    calls = [event for event in events if isinstance(event, Call)]
    assert [event.reason for event in events if isinstance(event, Ended)] == ["done"], events[-3:]
    assert [part.value for event in events if isinstance(event, Verified) for part in event.parts] == [1.0]
    assert [one.text for one in calls] == [call(SOLVES), call(SUBMIT)]
    assert [tool.name for one in calls for tool in one.tool_calls] == ["bash", "bash"]
    before, after = whole_prompts(calls)
    assert after[: len(before) + len(calls[0].sampled_ids)] == (*before, *calls[0].sampled_ids)
    assert calls[1].transition == "extend"
    assert max(off(model, prompt, made) for prompt, made in zip((before, after), calls, strict=True)) < NEAR
    assert tree_of(calls).figures.leaves == 1


async def trains_where_nothing_is_left(stack: VllmStack, host: str) -> None:
    """Looked at as soon as the host says that it trains: vLLM takes a while to end."""

    def status() -> HostStatus | None:
        found = stack.statuses.values.get(host)
        return found if found is not None and found.state is HostState.TRAIN else None

    await eventually(lambda: status() is not None, 120, found=stack.situation)
    found = status()
    assert found is not None
    assert (found.memory_bytes, stack.engine(host)) == (0, {}), "training starts where nothing of vLLM is left"


async def test_calls_go_on_through_the_drains_of_all_hosts(stack: VllmStack) -> None:
    """Moved with their tokens from the first, parked where none is left, gone on with when the first is back."""
    model = await stack.serve("noise")
    told_apart = [f"talk {number}" for number in range(3)]
    heard = [Heard() for _ in told_apart]
    first, second = HOSTS

    def found() -> str:
        return stack.situation(*heard)

    async with stack.playing(max_tokens=LONG) as (agent, _), asyncio.TaskGroup() as tasks:
        asking = [
            tasks.create_task(agent.ask([{"role": "user", "content": text}], one))
            for text, one in zip(told_apart, heard, strict=True)
        ]
        await eventually(lambda: all(len(one.text) > 20 for one in heard), 60, found=found)
        await stack.tell(first, "train")
        training = [tasks.create_task(trains_where_nothing_is_left(stack, host)) for host in HOSTS]
        await eventually(lambda: stack.running(second) == 3, 60, found=found)
        seen = [len(one.text) for one in heard]
        await eventually(
            lambda: all(len(one.text) > n + 20 for one, n in zip(heard, seen, strict=True)), 60, found=found
        )
        await stack.tell(second, "train")
        await asyncio.gather(*training)

        async def suspended() -> bool:
            return any(isinstance(event, Suspended) for event in await stack.log(agent.episode))

        await eventually(suspended)
        assert not any(task.done() for task in asking)
        await stack.tell(first, "rollout")
        async with asyncio.timeout(300):
            await asyncio.gather(*asking)
        events = await stack.log(agent.episode)
    calls = [event for event in events if isinstance(event, Call)]
    assert sorted(one.text for one in calls) == sorted(one.text for one in heard)
    for prompt, made in zip(whole_prompts(calls), calls, strict=True):
        assert made.hosts in ((first, second, first), (second, first)), "each part was sampled by who served then"
        assert len(made.sampled_ids) == LONG
        assert [(span.version, span.start, span.end) for span in made.versions] == [
            (stack.version, 0, len(made.sampled_ids))
        ]
        assert off(model, prompt, made) < NEAR, "as of a call that was never stopped"
        assert made.parked_s > 0
    assert any(isinstance(event, Resumed) for event in events)
    assert not any(isinstance(event, Ended) for event in events[: events.index(calls[-1])])
    for host in HOSTS:
        drained = [one for one in await stack.changes(host) if one.before is HostState.DRAINING]
        assert [one.after for one in drained] == [HostState.TRAIN]
        assert drained[0].freed_bytes > 1 << 30, "measured before and after"
        assert drained[0].moved_calls > 0


async def test_engines_that_are_killed_mid_call_lose_no_token_and_no_episode(stack: VllmStack) -> None:
    """The server of one, then the worker of the other: a call goes on from what came, and both serve again."""
    model = await stack.serve("noise")
    boots = {name: status.boot for name, status in stack.statuses.values.items()}
    interrupted = metrics.EPISODES_INTERRUPTED._value.get()
    heard = Heard()

    def found() -> str:
        return stack.situation(heard)

    async with stack.playing(max_tokens=LONG) as (agent, sandboxes), asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(agent.ask(USER, heard))
        await eventually(lambda: len(heard.text) > 20, 60, found=found)
        await eventually(lambda: any(map(stack.running, HOSTS)), found=found)
        first = stack.busy()
        second = next(name for name in HOSTS if name != first)
        stack.kill(first, "gyre_vllm_launch")
        await eventually(lambda: stack.running(second) == 1, 60, found=found)
        seen = len(heard.text)
        await eventually(lambda: len(heard.text) > seen + 20, 60, found=found)
        before = heard.text
        assert not asking.done(), "it ended before the second engine was killed"
        stack.kill(second, "Worker")
        async with asyncio.timeout(300):
            await asking
        [made] = await agent.calls()
        again = await agent.ask([*USER, heard.message, {"role": "user", "content": "go on"}], max_tokens=30)
        calls = await agent.calls()
        await stack.serving(*HOSTS)
        sandboxes.over.set()
        await eventually(lambda: stack.ended(agent.episode), 30)
        ends = [event for event in await stack.log(agent.episode) if isinstance(event, Ended)]
    assert made.text == heard.text
    assert heard.text.startswith(before)
    assert made.hosts[:2] == (first, second)
    assert len(made.hosts) == 3
    [prompt, *_] = whole_prompts(calls)
    assert len(made.sampled_ids) == LONG
    assert off(model, prompt, made) < NEAR
    assert [(span.version, span.start, span.end) for span in made.versions] == [(stack.version, 0, LONG)]
    assert calls[1].text == again.text
    assert [end.reason for end in ends] == ["done"]
    assert metrics.EPISODES_INTERRUPTED._value.get() == interrupted
    assert all(stack.statuses.values[name].boot != boot for name, boot in boots.items()), "hosts of their own started"
