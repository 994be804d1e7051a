"""A transcript that a base model goes on with: its text, its settings, and prompts that extend what was sampled."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.proto.examples import DISPATCH
from opengyre.proto.run import MAX_SHOTS, Harness, InvalidRunError, RunSpec, Shot, ShotTurn, validate
from opengyre.proto.traj import Call
from opengyre.rollout import transcript
from opengyre.rollout.ask import Ask
from opengyre.rollout.episode import AgentEnded
from opengyre.rollout.history import History
from opengyre.rollout.prompt import Renderer, prompt_of
from opengyre.rollout.router import Completion
from opengyre.rollout.shell import Continue, Execute, Step, decide
from opengyre.rollout.stops import before, cut
from opengyre.tiny.tokenizer import TinyTokenizer
from support.chats import renderer

SHOTS = (
    Shot(task="list it", turns=(ShotTurn(command="ls", output="a.txt\nb.txt\n"), ShotTurn(command="done"))),
    Shot(task="write x into a", turns=(ShotTurn(command="echo x > a"),)),
)
HARNESS = msgspec.structs.replace(DISPATCH.harness, prompt="transcript", shots=SHOTS, system=None, max_turns=3)
TASK = msgspec.structs.replace(DISPATCH.task, instruction="do it", max_turns=None)
EPISODE = msgspec.structs.replace(DISPATCH, harness=HARNESS, task=TASK)
BEGIN = "Task: list it\n$ ls\na.txt\nb.txt\n$ done\n\nTask: write x into a\n$ echo x > a\n\nTask: do it\n$"


def test_the_agent_goes_on_with_its_transcript() -> None:
    assert decide(EPISODE, []) == Continue(BEGIN, "\n")
    assert decide(EPISODE, [Step(" ls ", None)]) == Execute(0, "ls")
    assert decide(EPISODE, [Step(" ls ", "a")]) == Continue(BEGIN + " ls \na\n$", "\n")
    assert decide(EPISODE, [Step(" ls", ""), Step(" cat a", "b\n")]) == Continue(BEGIN + " ls\n$ cat a\nb\n$", "\n")
    assert decide(EPISODE, [Step(" done", None)]) == AgentEnded("done")
    assert decide(EPISODE, [Step("ls", "")] * 3) == AgentEnded("turn_budget")
    assert transcript.begin(" Be brief.\n", (), "do it ") == "Be brief.\n\nTask: do it\n$"


@pytest.mark.parametrize(
    ("harness", "reason"),
    [
        ({"prompt": "chat"}, "harness.shots is set, but nothing reads it without harness.prompt = transcript"),
        ({"agent": "program", "program": "x"}, "harness.agent is program; allowed is shell"),
        ({"shots": SHOTS * MAX_SHOTS}, "harness.shots has 128 examples; allowed are up to 64"),
        ({"shots": (Shot(task="a", turns=()),)}, r"harness.shots\[0\].turns is empty"),
        ({"shots": (Shot(task="a\nb", turns=SHOTS[0].turns),)}, r"shots\[0\].task is 'a\\nb'; allowed is one line"),
        (
            {"shots": (SHOTS[0], Shot(task="a", turns=(ShotTurn(command="ls"), ShotTurn(command=" "))))},
            r"harness.shots\[1\].turns\[1\].command is ' '; allowed is one line of text",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(harness: dict[str, object], reason: str) -> None:
    fields = {"prompt": "transcript", "shots": SHOTS, **harness}
    spec = RunSpec(run="r", model="m", harness=Harness(**fields))  # type: ignore[arg-type]  # fields by keyword, checked at run time
    with pytest.raises(InvalidRunError, match=reason):
        validate(spec)
    validate(RunSpec(run="r", model="m", harness=HARNESS))


TINY = TinyTokenizer.train(["$ echo one\n", "Task: a\n\nTask: b\n$", "\n\n\n\n"], 300)


def record(history: History, number: int, text: str, sampled: tuple[int, ...], render: Renderer) -> Call:
    """Ask and record, as the recorder does; what is said ends at the first end of a line."""
    prompt = prompt_of(Ask(api="completions", digest=str(number), text=text), history, render)
    whole = Completion(tokens=sampled, logprobs=(0.0,) * len(sampled), versions=(), finish="length", hosts=("h",))
    kept, stop = cut(whole, [transcript.STOP], render.decode)
    call = Call(
        run="r", group="g", execution="e", index=number, attempt=0, call=f"c{number}", turn=number,
        request_digest=str(number), parent=prompt.parent, prefix_tokens=prompt.prefix,
        prompt_ids=prompt.tokens[prompt.prefix :], sampled_ids=kept.tokens, logprobs=kept.logprobs, versions=(),
        temperature=1.0, finish_reason="stop", text=before(render.decode(kept.tokens), stop), hosts=("h",),
        api="completions", stop=stop, transition=prompt.transition,
    )  # fmt: skip
    history.take(call)
    return call


@pytest.mark.torch
@pytest.mark.parametrize("family", ["tiny", "chatml"])
@given(
    turns=st.lists(
        st.tuples(st.lists(st.integers(6, 255), min_size=1, max_size=6), st.sampled_from(["", "a.txt", "b\nc"])),
        min_size=1, max_size=4,
    )
)  # fmt: skip
def test_each_prompt_begins_with_the_one_before_and_what_was_sampled(
    family: str, turns: list[tuple[list[int], str]]
) -> None:
    render: Renderer = TINY if family == "tiny" else renderer("chatml")
    history, steps = History(), []
    behind: list[int] = []
    for number, (ids, seen) in enumerate(turns):
        wanted = decide(msgspec.structs.replace(EPISODE, harness=msgspec.structs.replace(HARNESS, max_turns=9)), steps)
        if not isinstance(wanted, Continue):
            return  # it said `done`
        sampled = tuple(token for token in ids if "\ufffd" not in render.decode([token]))
        call = record(history, number, wanted.text, (*sampled, *render.encode("\n")), render)
        if call.transition == "realign":  # its last token was more than the end of the line
            assert call.prefix_tokens == len(behind) - 1
        else:
            assert history.tokens(call)[: len(behind)] == behind
        assert render.decode(history.tokens(call)).startswith(wanted.text + call.text + "\n")
        behind = history.tokens(call)
        steps.append(Step(call.text, seen))


def test_a_last_token_that_is_more_than_the_end_of_a_line_is_encoded_again() -> None:
    [two] = TINY.encode("\n\n")
    history = History()
    first = record(history, 0, BEGIN, (*TINY.encode(" ls"), two), TINY)
    assert first.text == " ls"
    text = f"{BEGIN} ls\na.txt\n$"
    second = record(history, 1, text, tuple(TINY.encode(" done\n")), TINY)
    assert (second.parent, second.transition) == ("c0", "realign")
    assert second.prefix_tokens == len(history.tokens(first)) - 1
    assert TINY.decode(history.tokens(second)) == f"{text} done\n"
