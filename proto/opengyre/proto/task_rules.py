"""What a task must be to be accepted, wherever it comes in (REST, a file, a generator).

Pure. The first rule that does not hold is reported as one sentence that begins with the field's name.
"""

import math

import msgspec

from opengyre.proto.ids import BadIdentifierError, check_token
from opengyre.proto.task import Artifact, Healthcheck, TaskEnvironment, TaskSpec, TaskStep, TaskTests

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
MAX_VERSION = 10_000_000
MAX_TIMEOUT_S = 86_400.0
MAX_VARIABLES = 256
MAX_STEPS = 256
MAX_ARTIFACTS = 256
MAX_RETRIES = 1000
MAX_HOSTS = 256
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
    if spec.environment is not None:
        _environment("environment", spec.environment)
    _verifier(spec)
    if spec.max_turns is not None and not 1 <= spec.max_turns <= MAX_TURNS:
        raise InvalidTaskError("max_turns", f"is {spec.max_turns}; allowed are values from 1 to {MAX_TURNS}")
    _budget("time_budget_s", spec.time_budget_s)
    if not 1 <= spec.repeat <= MAX_REPEAT:
        raise InvalidTaskError("repeat", f"is {spec.repeat}; allowed are values from 1 to {MAX_REPEAT}")
    _from_version(spec)
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


def _from_version(spec: TaskSpec) -> None:
    if not 0 <= spec.from_version <= MAX_VERSION:
        raise InvalidTaskError("from_version", f"is {spec.from_version}; allowed are values from 0 to {MAX_VERSION}")
    if spec.from_version and spec.purpose == "train":
        raise InvalidTaskError(
            "from_version", f"is {spec.from_version} and purpose is train; allowed is 0, or with purpose evaluate"
        )


def _budget(field: str, budget: float | None) -> None:
    if budget is not None and not MIN_TIME_BUDGET_S <= budget <= MAX_TIME_BUDGET_S:
        allowed = f"{MIN_TIME_BUDGET_S:g} to {MAX_TIME_BUDGET_S:g} seconds"
        raise InvalidTaskError(field, f"is {budget}; allowed are values from {allowed}")


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


def _timeout(field: str, value: float) -> None:
    if not 0 < value <= MAX_TIMEOUT_S:
        raise InvalidTaskError(field, f"is {value}; allowed are values above 0 and up to {MAX_TIMEOUT_S:g} seconds")


def _variables(field: str, env: dict[str, str]) -> None:
    if len(env) > MAX_VARIABLES:
        raise InvalidTaskError(field, f"has {len(env)} entries; allowed are at most {MAX_VARIABLES}")
    for name, value in env.items():
        if not name or not name.isascii() or not name.replace("_", "a").isalnum() or name[0].isdigit():
            raise InvalidTaskError(field, f"names {name[:80]!r}; allowed are names of shell variables")
        _text(f"{field}.{name}", value, MAX_TEXT, empty=True)


def _user(field: str, value: str | None) -> None:
    if value is not None and not (0 < len(value) <= MAX_NAME and value.isprintable() and " " not in value):
        raise InvalidTaskError(field, f"is {value[:80]!r}; allowed is the name or number of a user")


def _absolute(field: str, path: str) -> None:
    if not (path.startswith("/") and path.isprintable() and len(path) <= MAX_PATH) or ".." in path.split("/"):
        raise InvalidTaskError(field, f"is {path[:80]!r}; allowed is an absolute path without '..'")


def _healthcheck(field: str, check: Healthcheck | None) -> None:
    if check is None:
        return
    _text(f"{field}.command", check.command, MAX_TEXT)
    _timeout(f"{field}.timeout_s", check.timeout_s)
    for name in ("interval_s", "start_period_s", "start_interval_s"):
        value = getattr(check, name)
        if not 0 <= value <= MAX_TIMEOUT_S:
            raise InvalidTaskError(f"{field}.{name}", f"is {value}; allowed are 0 to {MAX_TIMEOUT_S:g} seconds")
    if not 1 <= check.retries <= MAX_RETRIES:
        raise InvalidTaskError(f"{field}.retries", f"is {check.retries}; allowed are values from 1 to {MAX_RETRIES}")


def _environment(at: str, environment: TaskEnvironment) -> None:
    if (environment.image is None) == (environment.dockerfile is None):
        raise InvalidTaskError(at, "has both image and dockerfile or none; allowed is one of them")
    if environment.image is not None:
        _text(f"{at}.image", environment.image, MAX_PATH)
    if environment.dockerfile is not None:
        _text(f"{at}.dockerfile", environment.dockerfile, MAX_TEXT)
    if environment.workdir is not None:
        _absolute(f"{at}.workdir", environment.workdir)
    for field, value in (
        ("cpus", environment.cpus),
        ("memory_mb", environment.memory_mb),
        ("storage_mb", environment.storage_mb),
    ):
        if value is not None and not 0 < value <= 1 << 24:
            raise InvalidTaskError(f"{at}.{field}", f"is {value}; allowed are values above 0 and up to {1 << 24}")
    if environment.allowed_hosts and environment.network != "allowlist":
        raise InvalidTaskError(f"{at}.allowed_hosts", "is set; allowed is that with network = 'allowlist' only")
    if len(environment.allowed_hosts) > MAX_HOSTS:
        raise InvalidTaskError(
            f"{at}.allowed_hosts", f"has {len(environment.allowed_hosts)} entries; allowed are at most {MAX_HOSTS}"
        )
    _timeout(f"{at}.build_timeout_s", environment.build_timeout_s)
    _variables(f"{at}.env", environment.env)
    _user(f"{at}.user", environment.user)
    _healthcheck(f"{at}.healthcheck", environment.healthcheck)


def _artifacts(at: str, artifacts: tuple[Artifact, ...]) -> None:
    if len(artifacts) > MAX_ARTIFACTS:
        raise InvalidTaskError(at, f"has {len(artifacts)} entries; allowed are at most {MAX_ARTIFACTS}")
    for number, artifact in enumerate(artifacts):
        _absolute(f"{at}.{number}.source", artifact.source)
        folders = artifact.source.rstrip("/") + "/"
        if any(own.startswith(folders) or folders.startswith(own) for own in ("/tests/", "/logs/verifier/")):
            raise InvalidTaskError(
                f"{at}.{number}.source",
                f"is {artifact.source!r}; allowed is a path that has nothing of /tests and /logs/verifier",
            )
        for pattern in artifact.exclude:
            _text(f"{at}.{number}.exclude", pattern, MAX_PATH)


def _tests(at: str, tests: TaskTests) -> None:
    if not tests.archive and tests.environment is None:
        raise InvalidTaskError(f"{at}.archive", "is empty; allowed is that with an environment of the tests only")
    if tests.environment is not None:
        _environment(f"{at}.environment", tests.environment)
    elif tests.artifacts:
        raise InvalidTaskError(f"{at}.artifacts", "are given; allowed are they with an environment of the tests only")
    _artifacts(f"{at}.artifacts", tests.artifacts)
    _text(f"{at}.command", tests.command, MAX_TEXT)
    _timeout(f"{at}.timeout_s", tests.timeout_s)
    _variables(f"{at}.env", tests.env)
    _user(f"{at}.user", tests.user)
    for number, collect in enumerate(tests.collect):
        _text(f"{at}.collect.{number}.command", collect.command, MAX_TEXT)
        _timeout(f"{at}.collect.{number}.timeout_s", collect.timeout_s)
        _user(f"{at}.collect.{number}.user", collect.user)
    if tests.baseline < 0:
        raise InvalidTaskError(f"{at}.baseline", f"is {tests.baseline}; allowed is a number of tests, 0 or more")
    for name, weight in tests.weights.items():
        if not 0 < weight < math.inf:
            raise InvalidTaskError(f"{at}.weights.{name[:80]}", f"is {weight}; allowed are values above 0")


def _steps(steps: tuple[TaskStep, ...]) -> None:
    if len(steps) > MAX_STEPS:
        raise InvalidTaskError("steps", f"has {len(steps)} entries; allowed are at most {MAX_STEPS}")
    seen: set[str] = set()
    for number, step in enumerate(steps):
        at = f"steps.{number}"
        _text(f"{at}.name", step.name, MAX_NAME)
        if step.name in seen:
            raise InvalidTaskError(f"{at}.name", f"{step.name!r} is there twice; each step has a name of its own")
        seen.add(step.name)
        _text(f"{at}.instruction", step.instruction, MAX_TEXT)
        _tests(f"{at}.tests", step.tests)
        if step.setup is not None:
            _text(f"{at}.setup", step.setup, MAX_TEXT)
        _healthcheck(f"{at}.healthcheck", step.healthcheck)
        _budget(f"{at}.time_budget_s", step.time_budget_s)
        least = step.min_reward
        for value in least.values() if isinstance(least, dict) else () if least is None else (least,):
            if not math.isfinite(value):
                raise InvalidTaskError(f"{at}.min_reward", f"is {value}; allowed are finite numbers")


def _verifier(spec: TaskSpec) -> None:
    if spec.steps:
        if spec.checks or spec.tests is not None:
            raise InvalidTaskError("steps", "are there beside checks or tests; allowed is one verifier a step")
        if spec.environment is None:
            raise InvalidTaskError("steps", "need an environment; allowed without one are checks")
        _steps(spec.steps)
    elif spec.tests is None:
        _checks(spec)
    else:
        if spec.checks:
            raise InvalidTaskError("checks", "are there beside tests; allowed is one verifier")
        if spec.environment is None:
            raise InvalidTaskError("tests", "need an environment; allowed without one are checks")
        _tests("tests", spec.tests)


def _checks(spec: TaskSpec) -> None:
    if not 1 <= len(spec.checks) <= MAX_CHECKS:
        raise InvalidTaskError(
            "checks", f"has {len(spec.checks)} entries; allowed are one or more, up to {MAX_CHECKS}, or tests"
        )
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
