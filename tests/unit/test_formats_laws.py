"""Laws of the readers: whatever is in a file, it is read or refused in one sentence; order and repetition of a request
log's lines change nothing."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.formats import READERS, Forest, FormatError, Source, read_tree
from support.trajectory_logs import FIXTURES

leaf = st.none() | st.booleans() | st.integers(-3, 2**40) | st.floats(allow_nan=False) | st.text(max_size=4)
anything = st.recursive(
    leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        found += places(one, (*path, key))
    return found


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    at = value
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = new
    return value


def read_or_refused(log: Source, reader: str | None = None) -> None:
    """Nothing but a tree or a `FormatError` of one sentence comes of it."""
    sentence = ""
    try:
        read_tree(log, Forest(), reader)
    except FormatError as error:
        sentence = str(error)
    assert "\n" not in sentence


def parsed(name: str) -> list[Any]:
    text = (FIXTURES / name).read_text()
    return [json.loads(line) for line in text.splitlines()] if name.endswith("jsonl") else [json.loads(text)]


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.iterdir()))
@settings(max_examples=40)
@given(data=st.data())
def test_a_log_with_anything_anywhere_is_read_or_refused(name: str, data: st.DataObject) -> None:
    rows = parsed(name)
    path = data.draw(st.sampled_from(places(rows)[1:]))
    rows = put(rows, path, data.draw(anything))
    text = "\n".join(json.dumps(row) for row in rows).encode()
    for reader in (None, *(READERS if len(path) < 3 else ())):
        read_or_refused(Source(name, text), reader)


@given(cut=st.integers(0, 4000), name=st.sampled_from(sorted(path.name for path in FIXTURES.iterdir())))
def test_a_log_that_was_cut_is_read_or_refused(cut: int, name: str) -> None:
    read_or_refused(Source(name, (FIXTURES / name).read_bytes()[:cut]))


@given(order=st.permutations(range(4)), again=st.lists(st.integers(0, 3), max_size=3))
def test_repeated_lines_of_a_request_log_change_nothing(order: list[int], again: list[int]) -> None:
    history: list[Any] = [{"role": "user", "content": "go"}]
    rows: list[Any] = []
    for turn in range(4):
        answer = {"role": "assistant", "content": f"turn {turn}"}
        response = {"id": f"r{turn}", "choices": [{"message": answer, "finish_reason": "stop"}]}
        rows.append({"request": {"messages": list(history)}, "response": response})
        history += [answer, {"role": "user", "content": "on"}]
    shuffled = [rows[place] for place in [*order, *again]]
    found = read_tree(Source("log", "\n".join(map(json.dumps, shuffled)).encode()), Forest())
    assert (found.calls, found.events, found.path_tokens, found.unique_nodes, found.leaves) == (4, 4, 20, 8, 1)
