"""Reward files and progress. Pure.

``reward.json`` (a flat object of finite numbers) comes before ``reward.txt`` (one finite number, named ``reward``).
What cannot be read is a fault of the evaluation, never a zero.
"""

import json
import math
from collections.abc import Mapping, Sequence

from opengyre.tasks.errors import TaskError

FILES = ("reward.json", "reward.txt")
_ALLOWED = {"reward.json": "a flat object of finite numbers", "reward.txt": "one finite number"}
NAME = "reward"
MAX_BYTES = 64 << 10
MAX_REWARDS = 256
MAX_NAME = 96


def read_rewards(files: Mapping[str, bytes]) -> dict[str, float]:
    """The rewards that a verifier left, by the names of `FILES`; raises `TaskError`."""
    for name, read in zip(FILES, (_json, _text), strict=True):
        data = files.get(name)
        if data is None:
            continue
        if len(data) > MAX_BYTES:
            raise TaskError(f"{name} has {len(data)} bytes; allowed are {MAX_BYTES}")
        try:
            text = data.decode().strip()
        except UnicodeDecodeError as error:
            raise TaskError(f"{name} is not UTF-8 text") from error
        if not text:
            raise TaskError(f"{name} is empty; allowed is {_ALLOWED[name]}")
        return read(name, text)
    raise TaskError(f"the tests left no {FILES[0]} and no {FILES[1]} in /logs/verifier; one of them is needed")


def _text(name: str, text: str) -> dict[str, float]:
    try:
        value = float(text)
    except ValueError as error:
        raise TaskError(f"{name} is {text[:80]!r}; allowed is one finite number") from error
    if not math.isfinite(value):
        raise TaskError(f"{name} is {text[:80]!r}; allowed is one finite number")
    return {NAME: value}


def _json(name: str, text: str) -> dict[str, float]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(document, dict) or not 1 <= len(document) <= MAX_REWARDS:
        raise TaskError(f"{name} is no flat object of 1 to {MAX_REWARDS} finite numbers; nothing else is allowed")
    rewards = {}
    for key, value in document.items():
        if not key or len(key) > MAX_NAME or not key.isprintable():
            raise TaskError(f"{name} names {key[:80]!r}; allowed are 1 to {MAX_NAME} printable characters")
        number = _number(value)
        if number is None:
            raise TaskError(f"{name}: {key} is {json.dumps(value)[:80]}; allowed is a finite number")
        rewards[key] = number
    return rewards


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def progress(passed: int, total: int, baseline: int) -> float:
    """Which part of what was not done from the start is done by now: 0 to 1.

    ``baseline``: how many of the ``total`` tests pass with nothing done. Where those are all, there is nothing to do
    and nothing to be gained: 0, or 1 while they all still pass.
    """
    if total <= baseline:
        return 1.0 if total and passed >= total else 0.0
    return min(1.0, max(0.0, (passed - baseline) / (total - baseline)))


def enough(rewards: Mapping[str, float], least: float | Mapping[str, float] | None) -> bool:
    """Whether a step's rewards let the next step begin; a number is asked of ``reward``, or else of each."""
    if least is None:
        return True
    if isinstance(least, Mapping):
        return all(rewards.get(name, -math.inf) >= bound for name, bound in least.items())
    asked = [rewards[NAME]] if NAME in rewards else list(rewards.values())
    return all(value >= least for value in asked)


def over_steps(steps: Sequence[Mapping[str, float]], strategy: str, total: int) -> dict[str, float]:
    """The rewards of a task of ``total`` steps of which the first ones were run: the last step's, or the means.

    A step that was not reached, and a reward that a step does not name, count as 0.
    """
    names = list(dict.fromkeys(name for rewards in steps for name in rewards))
    if strategy == "final":
        return dict(steps[-1]) if steps and len(steps) == total else dict.fromkeys(names, 0.0)
    return {name: math.fsum(rewards.get(name, 0.0) for rewards in steps) / total for name in names}
