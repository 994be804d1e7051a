"""Chats by the templates of families of models, against what `transformers` makes of them; turns in their own ids."""

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from opengyre.chat.codec import UNBOUNDED, longest_token
from opengyre.chat.messages import ChatError
from opengyre.chat.template import ChatTemplate
from support.chats import SPECIALS, TEMPLATES, bpe, fast, renderer

pytestmark = pytest.mark.torch
FAMILIES = sorted(TEMPLATES)
APPENDING = ["chatml", "llama3", "qwen"]
SHELL = {
    "name": "shell",
    "description": "runs a command",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}

WORDS = st.sampled_from(["the cat", " sat", "\n", "\n\n", "é", "🙂", "a  b", "12", "<", "|>", "im_end", "\t", "{x}"])
TEXTS = st.lists(WORDS, max_size=5).map("".join)
ROLES = st.sampled_from(["user", "tool", "system"])


def messages(roles: list[str], texts: list[str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]


CHATS = st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), TEXTS), max_size=5).flatmap(
    lambda rest: st.tuples(st.booleans(), TEXTS).map(
        lambda first: [
            *([{"role": "system", "content": first[1]}] if first[0] else []),
            {"role": "user", "content": "begin"},
            *({"role": role, "content": text} for role, text in rest),
        ]
    )
)
SAMPLED = st.lists(st.integers(4, 300), max_size=8)


@pytest.mark.parametrize("family", APPENDING)
@given(chat=CHATS, prompt=st.booleans())
@settings(max_examples=40, deadline=None)
def test_ids_are_those_of_apply_chat_template(family: str, chat: list[dict[str, Any]], prompt: bool) -> None:
    wanted = fast(family).apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)
    assert renderer(family).render(chat, generation_prompt=prompt) == wanted


@pytest.mark.parametrize("family", APPENDING)
@given(chat=CHATS, sampled=SAMPLED, ended=st.booleans(), new=st.lists(st.tuples(ROLES, TEXTS), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_a_prompt_extends_the_one_before_and_what_was_sampled(
    family: str, chat: list[dict[str, Any]], sampled: list[int], ended: bool, new: list[tuple[str, str]]
) -> None:
    render = renderer(family)
    turn = [*sampled, *([render.stop_token_ids[0]] if ended else [])]
    after = [{"role": role, "content": text} for role, text in new]
    suffix = render.render_suffix(after, closed=ended)
    assume(suffix is not None)
    assert suffix is not None
    whole = render.render([*chat, {"role": "assistant", "token_ids": turn}, *after])
    assert whole == [*render.render(chat), *turn, *suffix]


@pytest.mark.parametrize("family", APPENDING)
@given(chat=CHATS, said=st.lists(WORDS, min_size=1, max_size=4).map("".join), new=TEXTS)
@settings(max_examples=40, deadline=None)
def test_a_turn_that_was_sampled_as_its_text_is_encoded_is_what_the_template_makes(
    family: str, chat: list[dict[str, Any]], said: str, new: str
) -> None:
    assume(said == said.strip())
    render = renderer(family)
    after = {"role": "tool", "content": new}
    suffix = render.render_suffix([after])
    assert suffix is not None
    turn = [*render.encode(said), render.stop_token_ids[0]]
    text = fast(family).decode([*render.render(chat), *turn, *suffix])
    wanted = fast(family).apply_chat_template(
        [*chat, {"role": "assistant", "content": said}, after], add_generation_prompt=True, tokenize=False
    )
    assert text == wanted


def test_the_classes_of_the_templates() -> None:
    user, tool = [{"role": "user", "content": "x"}], [{"role": "tool", "content": "x"}]
    suffixed = {
        family: [renderer(family).render_suffix(new) is not None for new in (user, tool)]
        for family in ("chatml", "llama3", "qwen")
    }
    # Qwen drops the thoughts of turns before a question, and keeps them while tools answer.
    assert suffixed == {"chatml": [True, True], "llama3": [True, True], "qwen": [False, True]}
    assert [renderer(family).rewrites for family in FAMILIES] == [False, False, True, True]
    assert renderer("moving").render_suffix(user) is None


def test_no_suffix_is_given_where_it_depends_on_what_stands_before() -> None:
    def numbered(messages: list[dict[str, Any]], _tools: Any, generation_prompt: bool) -> str:
        told = "".join(f"[{place} {message['role']}]{message['content']}" for place, message in enumerate(messages))
        return told + (f"[{len(messages)} assistant]" if generation_prompt else "")

    template = ChatTemplate(numbered, "", [])
    assert template.suffix([{"role": "user", "content": "x"}]) is None
    assert template.rewrites


def test_a_template_that_rewrites_keeps_the_turns_whose_text_it_keeps() -> None:
    render, question = renderer("qwen"), {"role": "user", "content": "and now?"}
    end = render.stop_token_ids[0]
    plain = [*(render.encode("c") + render.encode("at")), end]
    thinking = [*render.encode("<think>\nhm\n</think>\n\nyes"), end]
    assert render.encode("cat") != plain[:-1]  # not as the tokenizer would write it
    chat = [
        {"role": "user", "content": "a"}, {"role": "assistant", "token_ids": plain},
        {"role": "user", "content": "b"}, {"role": "assistant", "token_ids": thinking}, question,
    ]  # fmt: skip
    begin = render.render(chat[:1])
    after = render.render(chat)
    assert after[: len(begin) + len(plain)] == [*begin, *plain]
    texts = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "cat"}, chat[2]]
    texts += [{"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}, question]
    wanted = fast("qwen").apply_chat_template(texts, add_generation_prompt=True, tokenize=False)
    assert fast("qwen").decode(after) == wanted
    assert "<think>" not in wanted
    # While tools answer, the thought stays, and so do the ids.
    kept = render.render([*chat[2:4], {"role": "tool", "content": "out"}])
    assert kept == [
        *render.render(chat[2:3]),
        *thinking,
        *(render.render_suffix([{"role": "tool", "content": "out"}]) or ()),
    ]


def test_a_moving_marker_is_where_the_template_puts_it() -> None:
    render = renderer("moving")
    turn = [*render.encode("yes"), render.stop_token_ids[0]]
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "token_ids": turn},
        {"role": "user", "content": "b"},
    ]
    assert fast("moving").decode(render.render(chat)) == "<s>[q] a [/q]yes</s>[now] [q] b [/q]"


@pytest.mark.parametrize("family", FAMILIES)
def test_text_that_looks_like_a_special_token_stays_text(family: str) -> None:
    render = renderer(family)
    specials = set(SPECIALS[family])
    wild = " ".join(specials)
    clean = render.render([{"role": "user", "content": "x"}])
    chat = [{"role": "user", "content": wild}]
    ids = render.render(chat)
    numbers = {bpe(family).token_to_id(token) for token in specials}
    assert [token for token in ids if token in numbers] == [token for token in clean if token in numbers]
    assert wild in render.decode(ids)
    assert not numbers & set(render.encode(wild))


def test_stops_are_the_end_of_a_turn_and_what_the_files_say() -> None:
    ends = {
        family: [fast(family).convert_ids_to_tokens(s) for s in renderer(family).stop_token_ids] for family in FAMILIES
    }
    assert ends == {
        "chatml": ["<|im_end|>"],
        "llama3": ["<|eot_id|>"],
        "moving": ["</s>"],
        "qwen": ["<|im_end|>"],
    }
    render = renderer("qwen")
    end = render.stop_token_ids[0]
    assert render.completion_text([*render.encode(" cat \n"), end, *render.encode("rat")]) == "cat"


def test_begin_has_what_the_tokenizer_puts_in_front() -> None:
    assert renderer("chatml").begin("cat") == renderer("chatml").encode("cat")


def test_tools_are_told_by_the_template_where_it_can_and_else_in_the_system_prompt() -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "go"}]
    qwen = renderer("qwen")
    tools = [{"type": "function", "function": SHELL}]
    wanted = fast("qwen").apply_chat_template(chat, tools=tools, add_generation_prompt=True, return_dict=False)
    assert qwen.render(chat, tools=[SHELL]) == wanted
    llama = renderer("llama3")
    text = llama.decode(llama.render(chat, tools=[SHELL]))
    assert "Be brief.\n\n# Tools\n\nYou may call" in text
    assert json.dumps(tools[0]) in text
    assert text.count("system") == 1
    moving = renderer("moving")
    assert moving.decode(moving.render([chat[1]], tools=[SHELL])).startswith("[now] [q] # Tools\n\nYou may")


def test_calls_in_a_history_are_written_as_the_model_writes_them() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": '{"command": "ls <a>"}'}}
    chat = [
        {"role": "user", "content": "go"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "out"}]},
    ]  # fmt: skip
    written = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls <a>"}}\n</tool_call>'
    for family in ("qwen", "llama3", "chatml"):
        text = renderer(family).decode(renderer(family).render(chat, tools=[SHELL]))
        assert written in text, family
        assert "out" in text
    said = renderer("qwen").read_turn(f"I look.\n{written}", [SHELL])
    assert (said.content, said.calls) == ("I look.", (("shell", '{"command": "ls <a>"}'),))


def test_what_is_no_call_stays_text() -> None:
    qwen = renderer("qwen")
    for text in ("<tool_call>{x</tool_call>", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "plain"):
        assert (qwen.read_turn(text, [SHELL]).content, qwen.read_turn(text, [SHELL]).calls) == (text, ())
    call = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    assert qwen.read_turn(call, []).calls == ()
    assert qwen.settled("hi <tool", [SHELL]) == "hi"
    assert qwen.settled("hi <tool", []) == "hi <tool"
    assert qwen.settled("hi", [SHELL], "shell") == ""


def test_a_forced_call_is_begun_for_the_model() -> None:
    qwen = renderer("qwen")
    begin = qwen.opening([SHELL], "shell")
    assert qwen.decode(begin) == '<tool_call>\n{"name": "shell", "arguments": '
    assert begin[0] == bpe("qwen").token_to_id("<tool_call>")
    said = qwen.read_turn(qwen.decode(begin) + '{"command": "ls"}}' + qwen.call_end, [SHELL], "shell")
    assert said.calls == (("shell", '{"command": "ls"}'),)
    assert qwen.decode(qwen.opening([SHELL, {**SHELL, "name": "other"}], "")) == '<tool_call>\n{"name": '


@pytest.mark.parametrize(
    ("chat", "reason"),
    [
        ([{"role": "judge", "content": "x"}], r"messages\[0\]: the role is 'judge'; allowed are system, developer"),
        ([{"role": "user", "content": 3}], r"messages\[0\]: the content is int; allowed are a string or a list"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"has a part that is not text"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "x"}}]}], r"must have function.name and function"),
        ([{"role": "system", "content": "x"}], "template refuses the messages: only user and assistant speak here"),
    ],
)
def test_what_cannot_be_rendered_is_refused_in_a_sentence(chat: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(ChatError, match=reason):
        renderer("moving").render(chat)


def test_a_bound_of_a_tokens_text_is_given_only_where_there_is_one() -> None:
    byte_level = json.loads(bpe("chatml").to_str())
    longest = max(len(word) for word in byte_level["model"]["vocab"] if not word.startswith("<|"))
    assert longest_token(byte_level) >= longest
    for harm in (
        {"model": {**byte_level["model"], "type": "Unigram"}},
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": None, "decoder": None},
        {"added_tokens": [{"content": "<x>", "special": True, "rstrip": True}]},
    ):
        assert longest_token({**byte_level, **harm}) == UNBOUNDED
    assert renderer("qwen").longest_token == UNBOUNDED  # it drops thoughts
    assert renderer("chatml").longest_token < 100


@given(text=st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_no_token_stands_for_more_text_than_the_bound(text: str) -> None:
    render = renderer("chatml")
    assert len(render.encode(text)) * render.longest_token >= len(text)
