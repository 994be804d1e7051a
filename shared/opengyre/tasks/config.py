"""``task.toml`` of Harbor, schema 1.0 to 1.4, as pydantic models (mirrored from harbor 0.26, Apache-2.0). Pure.

Unknown keys are tolerated: newer versions add some. Spellings of older ones are read: ``version`` for
``schema_version``, ``allow_internet`` for ``network_mode``, ``memory = "2G"`` and ``storage = "10G"`` for the sizes in
MiB. Durations are in seconds.
"""

import ipaddress
import re
import tomllib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from opengyre.tasks.errors import TaskError

VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)
_MIB = {"": 1 / (1 << 20), "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}
_TEMPLATE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_NAME = re.compile(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+")

_HOST = re.compile(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*\.?")

NetworkMode = Literal["public", "no-network", "allowlist"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]


def _user(value: Any) -> str | None:
    """A user's number is a name here: what runs commands takes both alike."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return str(value)
    if isinstance(value, str) and value and value.isprintable() and not value.isspace():
        return value
    raise ValueError("allowed is the name of a user or a number of 0 or more")


def _absolute(path: str) -> str:
    if not path.startswith("/") or "\0" in path or ".." in path.split("/"):
        raise ValueError("allowed is an absolute path without '..'")
    return path


def _carried(path: str) -> str:
    folders = path.rstrip("/") + "/"
    if any(own.startswith(folders) or folders.startswith(own) for own in ("/tests/", "/logs/verifier/")):
        raise ValueError("allowed is a path that has nothing of /tests and /logs/verifier, which are the verifier's")
    return path


User = Annotated[str, BeforeValidator(_user)]
Absolute = Annotated[str, AfterValidator(_absolute)]
Carried = Annotated[str, AfterValidator(_absolute), AfterValidator(_carried)]


def _host(value: str) -> str:
    try:
        ipaddress.ip_network(value, strict=True)
    except ValueError:
        if not _HOST.fullmatch(value):
            raise ValueError("allowed are a host name, *.name, an address or a network such as 10.0.0.0/8") from None
    return value


Host = Annotated[str, AfterValidator(_host)]


def mebibytes(text: str) -> int:
    """``2G`` -> 2048; raises `ValueError`."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or float(found[1]) * _MIB[found[2].upper()] < 1:
        raise ValueError(f"is {text!r}; allowed is a size of at least 1 MiB such as 512M or 2G")
    return int(float(found[1]) * _MIB[found[2].upper()])


class _Open(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)


class Networked(_Open):
    """What may be reached, in the tables that say it."""

    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[Host, ...] | None = None

    @model_validator(mode="after")
    def _hosts(self) -> "Networked":
        if self.allowed_hosts is not None and self.network_mode != "allowlist":
            raise ValueError("allowed_hosts is set; allowed is that with network_mode = 'allowlist' only")
        return self


class Author(_Open):
    name: str
    email: str | None = None


class Package(_Open):
    """``[task]``"""

    name: str
    version: str | None = None
    description: str = ""
    authors: tuple[Author, ...] = ()
    keywords: tuple[str, ...] = ()

    @field_validator("name")
    @classmethod
    def _two_parts(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError("allowed is organisation/name of A-Z, a-z, 0-9, '.', '_' and '-'")
        return name


class Agent(Networked):
    """``[agent]``"""

    timeout_sec: Positive | None = None
    user: User | None = None


class Healthcheck(_Open):
    """``[environment.healthcheck]``, ``[steps.healthcheck]``: as Docker's."""

    command: Text
    interval_sec: NotNegative = 5.0
    timeout_sec: Positive = 30.0
    start_period_sec: NotNegative = 0.0
    start_interval_sec: NotNegative = 5.0
    retries: int = Field(default=3, ge=1)


class Tpu(_Open):
    type: str
    topology: str


class McpServer(_Open):
    name: str
    transport: Literal["stdio", "sse", "streamable-http"] = "sse"
    url: str | None = None
    command: str | None = None
    args: tuple[str, ...] = ()
    headers: dict[str, str] = {}

    @model_validator(mode="after")
    def _reached(self) -> "McpServer":
        needed = "command" if self.transport == "stdio" else "url"
        if getattr(self, needed) is None:
            raise ValueError(f"transport is {self.transport!r} without {needed}; it needs that")
        return self


class Environment(Networked):
    """``[environment]``, and ``[verifier.environment]``"""

    build_timeout_sec: Positive = 600.0
    docker_image: Text | None = None
    os: Literal["linux", "windows"] = "linux"
    cpus: Positive | None = None
    memory_mb: int | None = Field(default=None, ge=1)
    storage_mb: int | None = Field(default=None, ge=1)
    gpus: int | None = Field(default=None, ge=0)
    gpu_types: tuple[str, ...] | None = None
    tpu: Tpu | None = None
    mcp_servers: tuple[McpServer, ...] = ()
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: Healthcheck | None = None
    workdir: Absolute | None = None

    @model_validator(mode="before")
    @classmethod
    def _older(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        found = dict(data)
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            text = found.pop(old, None)
            if text is not None and found.get(new) is None:
                try:
                    found[new] = mebibytes(str(text))
                except ValueError as error:
                    raise ValueError(f"{old} {error}") from error
        internet = found.pop("allow_internet", None)
        if internet is not None and found.get("network_mode") is None:
            if not isinstance(internet, bool):
                raise ValueError("allow_internet is no truth value; allowed are true and false")
            found["network_mode"] = "public" if internet else "no-network"
        return found

    @property
    def network(self) -> NetworkMode:
        """What holds where nothing is said: the format's default."""
        return self.network_mode or "public"


class Collect(_Open):
    """``[[verifier.collect]]``: a command in the agent's environment before the verifier begins."""

    command: Text
    service: str = "main"
    timeout_sec: Positive = 60.0
    user: User | None = None


class Verifier(Networked):
    """``[verifier]``"""

    timeout_sec: Positive = 600.0
    env: dict[str, str] = {}
    user: User | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Environment | None = None
    collect: tuple[Collect, ...] = ()

    @model_validator(mode="after")
    def _apart(self) -> "Verifier":
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError("environment is set with environment_mode = 'shared'; allowed is it with 'separate' only")
        return self

    @property
    def said(self) -> Literal["shared", "separate"] | None:
        """Separate by itself where it has an environment of its own; None: not said here."""
        return self.environment_mode or ("separate" if self.environment is not None else None)

    @property
    def mode(self) -> Literal["shared", "separate"]:
        """What holds where nothing else says more."""
        return self.said or "shared"


class Solution(_Open):
    """``[solution]``"""

    env: dict[str, str] = {}


class Artifact(_Open):
    """What a verifier in an environment of its own is given of the agent's, at the same path."""

    source: Carried
    destination: str | None = None
    """Where Harbor keeps it beside its results; not used here."""
    exclude: tuple[str, ...] = ()
    service: str | None = None


def _artifacts(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [{"source": item} if isinstance(item, str) else item for item in value]
    return value


class Step(_Open):
    """``[[steps]]``"""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    agent: Agent = Agent()
    verifier: Verifier = Verifier()
    min_reward: Finite | dict[str, Finite] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: tuple[Artifact, ...] = ()

    @field_validator("artifacts", mode="before")
    @classmethod
    def _strings(cls, value: Any) -> Any:
        return _artifacts(value)


class Config(_Open):
    """All of ``task.toml``."""

    schema_version: str = "1.4"
    source: str | None = None
    artifacts: tuple[Artifact, ...] = ()
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: tuple[Step, ...] = ()
    task: Package | None = None
    metadata: dict[str, Any] = {}
    agent: Agent = Agent()
    verifier: Verifier = Verifier()
    environment: Environment = Environment()
    solution: Solution = Solution()

    @model_validator(mode="before")
    @classmethod
    def _older(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and "version" in data and "schema_version" not in data:
            data = {**data, "schema_version": data["version"]}
        return data

    @field_validator("schema_version")
    @classmethod
    def _known(cls, version: str) -> str:
        if version not in VERSIONS:
            raise ValueError(f"allowed are {', '.join(VERSIONS)}")
        return version

    @field_validator("artifacts", mode="before")
    @classmethod
    def _strings(cls, value: Any) -> Any:
        return _artifacts(value)

    @field_validator("steps")
    @classmethod
    def _distinct(cls, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        if len({step.name for step in steps}) < len(steps):
            raise ValueError("two steps share a name; allowed is a name of its own for each")
        return steps


def read_config(text: str, place: str = "task.toml") -> Config:
    """The configuration that a file says; raises `TaskError`."""
    try:
        return Config.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{place} is not valid TOML: {error}") from error
    except ValidationError as error:
        raise TaskError(sentence(place, error)) from error


def sentence(place: str, error: ValidationError) -> str:
    """The first fault of a document: its field, its value and what is allowed."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"] if not _is_type(part))
    message = str(first["msg"]).removeprefix("Value error, ")
    for word, plain in _PLAIN:
        message = message.replace(word, plain)
    if first["type"] == "missing":
        return f"{place}: {where} is missing; the format needs it"
    value = repr(first["input"])
    shown = f" is {value[:80]}" if len(value) <= 80 and not isinstance(first["input"], Mapping) else ""
    return f"{place}: {where}{shown}: {message}" if where else f"{place}: {message}"


_PLAIN = (("valid tuple", "list"), ("valid dictionary or instance of", "table of"), ("valid dictionary", "table"))
"""What the library calls things, and how TOML does."""


def _is_type(part: str | int) -> bool:
    """Whether a part of a place is the name of a type of a union, which is no field."""
    return isinstance(part, str) and (part in ("str", "int", "float") or "[" in part)


def resolve(where: str, env: Mapping[str, str], outside: Mapping[str, str]) -> dict[str, str]:
    """``env`` with ``${VAR}`` and ``${VAR:-default}`` replaced by what is ``outside``; raises `TaskError`."""

    def value(found: re.Match[str]) -> str:
        name, default = found[1], found[2]
        if name in outside:
            return outside[name]
        if default is None:
            raise TaskError(
                f"{where} wants ${{{name}}}; set {name} in the environment, or give a default as ${{{name}:-...}}"
            )
        return default

    return {name: _TEMPLATE.sub(value, text) for name, text in env.items()}
