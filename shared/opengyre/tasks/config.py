"""``task.toml`` of Harbor, schema 1.0 to 1.4, as pydantic models (mirrored from harbor 0.26, Apache-2.0). Pure.

Unknown keys are tolerated: newer versions add some. Spellings of older ones are read: ``version`` for
``schema_version``, ``allow_internet`` for ``network_mode``, ``memory = "2G"`` and ``storage = "10G"`` for the sizes in
MiB. Durations are in seconds.
"""

import re
import tomllib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from opengyre.tasks.errors import TaskError

VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)
_MIB = {"": 1 / (1 << 20), "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}
_TEMPLATE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_NAME = re.compile(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+")

NetworkMode = Literal["public", "no-network", "allowlist"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def mebibytes(text: str) -> int:
    """``2G`` -> 2048; raises `ValueError`."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or float(found[1]) * _MIB[found[2].upper()] < 1:
        raise ValueError(f"is {text!r}; allowed is a size of at least 1 MiB such as 512M or 2G")
    return int(float(found[1]) * _MIB[found[2].upper()])


class _Open(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)


class _Networked(_Open):
    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _hosts(self) -> "_Networked":
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


class Agent(_Networked):
    """``[agent]``"""

    timeout_sec: Positive | None = None
    user: str | int | None = None


class Healthcheck(_Open):
    command: str
    interval_sec: Positive = 5.0
    timeout_sec: Positive = 30.0
    start_period_sec: float = Field(default=0.0, ge=0)
    start_interval_sec: Positive = 5.0
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


class Environment(_Networked):
    """``[environment]``, and ``[verifier.environment]``"""

    build_timeout_sec: Positive = 600.0
    docker_image: str | None = None
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
    workdir: str | None = None

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

    command: str
    service: str = "main"
    timeout_sec: Positive = 60.0
    user: str | int | None = None


class Verifier(_Networked):
    """``[verifier]``"""

    timeout_sec: Positive = 600.0
    env: dict[str, str] = {}
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Environment | None = None
    collect: tuple[Collect, ...] = ()

    @property
    def mode(self) -> Literal["shared", "separate"]:
        """Separate by itself where it has an environment of its own."""
        return self.environment_mode or ("separate" if self.environment is not None else "shared")


class Solution(_Open):
    """``[solution]``"""

    env: dict[str, str] = {}


class Artifact(_Open):
    source: str
    destination: str | None = None
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
    min_reward: float | dict[str, float] | None = None
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
    where = ".".join(str(part) for part in first["loc"] if part not in ("str", "int", "float"))
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "missing":
        return f"{place}: {where} is missing; the format needs it"
    value = repr(first["input"])
    shown = f" is {value[:80]}" if len(value) <= 80 and not isinstance(first["input"], Mapping) else ""
    return f"{place}: {where}{shown}: {message}" if where else f"{place}: {message}"


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
