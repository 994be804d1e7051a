"""What a task must be to be accepted, wherever it comes in (REST, a file, a generator).

Pure. The first rule that does not hold is reported as one sentence that begins with the field's name.
"""

import math

import msgspec

from opengyre.proto.ids import BadIdentifierError, check_token
from opengyre.proto.task import TaskSpec

MAX_TEXT = 64 << 10
"""Characters of an instruction or a command."""
MAX_TASK_BYTES = 4 << 20
"""Of a task's JSON: it travels in messages of the bus."""
MAX_FILES = 1000
MAX_PATH = 240
MAX_CHECKS = 64
MAX_LABELS = 64
MAX_NAME = 96
MAX_TURNS = 100_000
MAX_TIME_BUDGET_S = 604_800.0
MIN_TIME_BUDGET_S = 0.1
MAX_REPEAT = 100_000
WEIGHT_TOLERANCE = 1e-6


class InvalidTaskError(ValueError):
    """A field of a task is not as it must be; `field` names it and the message says what is allowed."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field


def validate_task(spec: TaskSpec) -> TaskSpec:
    """Return `spec` if every rule holds, else raise `InvalidTaskError` for the first that does not."""
    try:
        check_token("task", spec.task)
    except BadIdentifierError as error:
        raise InvalidTaskError("task", str(error).removeprefix("task ")) from error
    _text("instruction", spec.instruction, MAX_TEXT)
    _files(spec.files)
    _checks(spec)
    if spec.max_turns is not None and not 1 <= spec.max_turns <= MAX_TURNS:
        raise InvalidTaskError("max_turns", f"is {spec.max_turns}; allowed are values from 1 to {MAX_TURNS}")
    budget = spec.time_budget_s
    if budget is not None and not MIN_TIME_BUDGET_S <= budget <= MAX_TIME_BUDGET_S:
        allowed = f"{MIN_TIME_BUDGET_S:g} to {MAX_TIME_BUDGET_S:g} seconds"
        raise InvalidTaskError("time_budget_s", f"is {budget}; allowed are values from {allowed}")
    if not 1 <= spec.repeat <= MAX_REPEAT:
        raise InvalidTaskError("repeat", f"is {spec.repeat}; allowed are values from 1 to {MAX_REPEAT}")
    if spec.family is not None:
        _text("family", spec.family, MAX_NAME)
    if len(spec.labels) > MAX_LABELS:
        raise InvalidTaskError("labels", f"has {len(spec.labels)} entries; allowed are at most {MAX_LABELS}")
    for key, value in spec.labels.items():
        _text("labels", key, MAX_NAME)
        _text(f"labels.{key}", value, MAX_NAME, empty=True)
    size = len(msgspec.json.encode(spec))
    if size > MAX_TASK_BYTES:
        raise InvalidTaskError("files", f"make the task {size} bytes of JSON; allowed are at most {MAX_TASK_BYTES}")
    return spec


def printable(value: str) -> bool:
    """Whether `value` can be stored and passed to a program: valid Unicode without NUL."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value


def _text(field: str, value: str, most: int, *, empty: bool = False) -> None:
    if not empty and not value.strip():
        raise InvalidTaskError(field, f"is empty; allowed are 1 to {most} characters")
    if len(value) > most:
        raise InvalidTaskError(field, f"has {len(value)} characters; allowed are at most {most}")
    if not printable(value):
        raise InvalidTaskError(field, "contains NUL or half of a surrogate pair; allowed is any other text")


def _files(files: dict[str, str]) -> None:
    if len(files) > MAX_FILES:
        raise InvalidTaskError("files", f"has {len(files)} entries; allowed are at most {MAX_FILES}")
    for path, content in files.items():
        parts = path.split("/")
        if not printable(path) or not path.isprintable() or len(path.encode()) > MAX_PATH:
            raise InvalidTaskError("files", f"names {path[:80]!r}; allowed are 1 to {MAX_PATH} printable bytes")
        if any(part in ("", ".", "..") for part in parts):
            raise InvalidTaskError(
                "files", f"names {path!r}; allowed are relative paths without empty parts, '.' and '..'"
            )
        if any("/".join(parts[:depth]) in files for depth in range(1, len(parts))):
            raise InvalidTaskError("files", f"names {path!r} below another file; a path is a file or a folder")
        if not printable(content):
            raise InvalidTaskError(f"files.{path}", "contains NUL or half of a surrogate pair; allowed is other text")


def _checks(spec: TaskSpec) -> None:
    if not 1 <= len(spec.checks) <= MAX_CHECKS:
        raise InvalidTaskError("checks", f"has {len(spec.checks)} entries; allowed are 1 to {MAX_CHECKS}")
    seen: set[str] = set()
    for number, check in enumerate(spec.checks):
        where = f"checks.{number}"
        _text(f"{where}.name", check.name, MAX_NAME)
        _text(f"{where}.command", check.command, MAX_TEXT)
        if not 0 < check.weight <= 1:
            raise InvalidTaskError(f"{where}.weight", f"is {check.weight}; allowed are values above 0 and up to 1")
        if check.name in seen:
            raise InvalidTaskError(f"{where}.name", f"{check.name!r} is there twice; each check has a name of its own")
        seen.add(check.name)
    total = math.fsum(check.weight for check in spec.checks)
    if abs(total - 1) > WEIGHT_TOLERANCE:
        raise InvalidTaskError("checks", f"have weights that sum to {total:g}; allowed is a sum of 1")
