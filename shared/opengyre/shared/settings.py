"""Settings: one TOML file (`gyre.toml`, or the path in `GYRE_CONFIG`) and the environment (`GYRE_<SECTION>__<KEY>`).

The environment wins over the file, the file over the defaults. Unknown keys are refused. A list in the environment is
JSON, or texts with commas between them. Each service writes the resolved form beside its state
(`<state_dir>/settings/<service>.json`), secrets left out.
"""

import json
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo

from opengyre.shared.masked import masked
from opengyre.shared.settings_words import allowed

PREFIX = "GYRE_"
OUTSIDE = {"GYRE_CONFIG", "GYRE_TEST_DATA", "GYRE_STATE_DIR", "GYRE_GATEWAY_URL", "GYRE_API_KEY"}


class SettingsError(Exception):
    """The settings cannot be used; the message names the key and what is allowed."""


def _url(*schemes: str) -> AfterValidator:
    """Checks that each of the URLs, separated by commas, has one of `schemes`, a host and a port that can be."""

    def check(text: str) -> str:
        for url in text.split(","):
            try:
                parts = urlsplit(url.strip())
                fine = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
            except ValueError:
                fine = False
            if not fine:
                raise ValueError(f"allowed is a URL like {schemes[0]}://127.0.0.1:1234")
        return text

    return AfterValidator(check)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BusSettings(Section):
    url: Annotated[str, _url("nats", "tls", "ws", "wss")] = Field(
        default="nats://127.0.0.1:4222", description="NATS server, or several separated by commas"
    )
    replicas: int = Field(default=1, ge=1, le=5, description="copies of each stream; 3 on a cluster")


class CacheSettings(Section):
    url: Annotated[str, _url("redis", "rediss")] | None = Field(
        default=None, description="Valkey or Redis for hot blobs; without it, files alone"
    )
    ttl_s: int = Field(default=3600, ge=1)


class HttpSettings(Section):
    bind: str = Field(default="127.0.0.1", description="address that a service listens on")
    port: int = Field(default=0, ge=0, le=65535, description="0 takes a free one")
    advertise: str | None = Field(default=None, description="host name for others; default: the bind address")


class LogSettings(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "console"] = "json"


class GatewaySettings(Section):
    api_keys: tuple[Annotated[SecretStr, Field(min_length=1)], ...] = Field(
        default=(), description="accepted keys; none: no key is asked for"
    )
    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    max_pending_tasks: int = Field(default=100_000, ge=1, description="submitted and not yet admitted; above it, 429")


class AllocatorSettings(Section):
    lease_s: int = Field(default=4, ge=2, le=300, description="time to live of the leader's lease")
    tick_s: float = Field(default=0.25, gt=0, le=60, description="how often it looks when nothing happens")


class RolloutSettings(Section):
    max_episodes: int = Field(default=64, ge=1, description="live episodes of one replica")
    sandbox_ttl_s: int = Field(default=120, ge=5, description="lease of a sandbox; renewed at a third of it")
    call_timeout_s: float = Field(default=600, gt=0, description="bound of one model call, without parking")
    hedge_after_s: float | None = Field(
        default=None,
        ge=0.02,
        le=600,
        description="a call without a token for so long is asked of a second host that has room; default: never",
    )


class SandboxSettings(Section):
    node: str = Field(default="node0", description="name of this node, stable over restarts")
    backend: Literal["bubblewrap", "docker"] = Field(
        default="bubblewrap", description="docker needs an engine on this machine and the extra opengyre[docker]"
    )
    docker_socket: str | None = Field(
        default=None, pattern="^/", description="docker: the engine's; default: DOCKER_HOST, else /var/run/docker.sock"
    )
    docker_image: str = Field(
        default="debian:bookworm-slim", description="docker: what a sandbox shows that names no image; it must be there"
    )
    stand_in: str | None = Field(
        default=None,
        description="image that takes the place of a task's base that is not here; host: this machine's programs",
    )
    offline: bool = Field(
        default=True,
        description="tasks' tests and Dockerfiles find stand-ins of apt-get, curl, pip, uv and uvx first on PATH",
    )
    workspace_mb: int = Field(default=16, ge=1)
    memory_mb: int = Field(default=256, ge=16)
    pids: int = Field(default=64, ge=4)
    spool_mb: int = Field(
        default=64,
        ge=1,
        description="MiB kept of the full outputs of a sandbox's commands together; at least what one may write",
    )
    max_sandboxes: int = Field(default=512, ge=1)
    allow_unisolated: bool = Field(default=False, description="go on where no isolation can be had")
    binds: tuple[Annotated[str, Field(pattern=r"^/[^=]+=/[^=]*$")], ...] = Field(
        default=(), description="folders of this machine that every sandbox shows, read-only: /in/the/sandbox=/here"
    )

    image_roots: tuple[Annotated[str, Field(pattern="^/")], ...] = Field(
        default=(), description="bubblewrap: folders below which the root directories lie that a sandbox may be made of"
    )
    image_cache_mb: int = Field(default=4096, ge=1, description="bubblewrap: size of the cache of images")

    def bound(self) -> dict[str, str]:
        """`binds`, by path in the sandbox."""
        return dict(bind.split("=", 1) for bind in self.binds)


class TrajectorySettings(Section):
    concurrency: int = Field(default=8, ge=1)


class TrainerSettings(Section):
    keep_checkpoints: int = Field(default=3, ge=1)
    cell_timeout_s: float = Field(default=10, gt=0, description="a cell silent for so long is given up")


class HostSettings(Section):
    host: str = Field(default="host0", description="name of this host, stable over restarts")
    cell: str | None = Field(default=None, description="cell it belongs to; default: a cell of its own")
    engine: Literal["tiny", "vllm", "emulated"] = Field(
        default="tiny",
        description="tiny computes; vllm serves by vLLM, in an environment of its own; "
        "emulated has no model and takes time, to measure everything else",
    )
    count: int = Field(
        default=1, ge=1, le=10_000, description="emulated hosts of this one process, named <host>-000, <host>-001, ..."
    )
    threads: int = Field(default=1, ge=1)
    ranks: int = Field(
        default=1, ge=1, le=64, description="processes that share the work of a training cell (FSDP2), threads each"
    )
    chunk: int = Field(default=2048, ge=1, description="tokens that a training cell computes at once; bounds memory")
    offload: bool = Field(default=False, description="a training cell keeps keys and values in host memory")
    forest_tokens: int | None = Field(
        default=None,
        ge=1,
        description="distinct tokens that a training cell walks at once; more are walked in parts; default: all",
    )
    capacity: float = Field(default=32, ge=1, description="calls it serves at full speed; the tiny engine rounds down")
    dry_switch: bool = Field(
        default=True, description="sleep and wake once after the first load, so that a switch's duration is known"
    )
    heartbeat_s: float = Field(default=1.0, gt=0, le=60)
    lost_after_s: int = Field(default=5, ge=2, description="time to live of its heartbeat")
    vllm_python: str | None = Field(
        default=None,
        description="vllm: the python that has it; default: that of .venv-vllm, which `make vllm` makes, or the host's",
    )
    vllm_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="vllm: in what weights are served; auto: as they are"
    )
    vllm_context: int = Field(default=2048, ge=16, description="vllm: tokens of prompt and completion together")
    vllm_kv_gb: int = Field(default=1, ge=1, description="vllm on a CPU: GiB for keys and values")
    vllm_memory_fraction: float = Field(
        default=0.9, gt=0, le=1, description="vllm on a GPU: its share of the memory, weights included"
    )
    vllm_tensor_parallel: int = Field(default=1, ge=1, le=1024, description="vllm: GPUs that share one replica")
    vllm_canary_nats: float | None = Field(
        default=None,
        gt=0,
        description="vllm: how far log-probs of a version's canary may be from the trainer's, on average; "
        "default: 0.001 in float32, 0.1 in float16, 0.25 in bfloat16",
    )
    vllm_stream_interval: int = Field(
        default=8,
        ge=1,
        le=1024,
        description="vllm: tokens of a call that come together; if a server dies the last of them are sampled again",
    )
    vllm_start_s: float = Field(default=300, gt=0, le=3600, description="vllm: how long a start may take")
    vllm_arguments: tuple[str, ...] = Field(default=(), description="vllm: further arguments of its server")
    tokens_per_s: float = Field(
        default=40, gt=0, le=1e9, description="emulated: of a call at full speed; above capacity calls share evenly"
    )
    switch_s: float = Field(default=0, ge=0, le=86_400, description="emulated: duration of a sleep, and of a wake")
    train_s_per_execution: float = Field(
        default=1, ge=0, le=86_400, description="emulated: how long a cell trains an execution"
    )
    time_scale: float = Field(
        default=1, gt=0, le=1e6, description="emulated: everything takes so many times less than it says"
    )

    @field_validator("count")
    @classmethod
    def _many(cls, count: int, info: ValidationInfo) -> int:
        if count > 1 and info.data.get("engine") != "emulated":
            raise ValueError("allowed is 1, or more with host.engine emulated")
        if count > 1 and info.data.get("cell") is not None:
            raise ValueError("allowed is 1 with host.cell set: several hosts of a process are a cell each")
        return count

    @field_validator("vllm_arguments")
    @classmethod
    def _arguments(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        if arguments and not arguments[0].startswith("-"):
            raise ValueError("allowed are arguments like --kv-cache-dtype")
        return arguments


class Settings(Section):
    state_dir: Path = Path(".gyre")
    log: LogSettings = LogSettings()
    bus: BusSettings = BusSettings()
    cache: CacheSettings = CacheSettings()
    http: HttpSettings = HttpSettings()
    gateway: GatewaySettings = GatewaySettings()
    allocator: AllocatorSettings = AllocatorSettings()
    rollout: RolloutSettings = RolloutSettings()
    sandbox: SandboxSettings = SandboxSettings()
    trajectory: TrajectorySettings = TrajectorySettings()
    trainer: TrainerSettings = TrainerSettings()
    host: HostSettings = HostSettings()

    def resolved(self) -> str:
        """JSON of every setting as it is in force; keys, and whatever stands before an @ in an address, are masked."""
        return masked(self.model_dump_json(indent=2))


def load(path: Path | None = None, environment: dict[str, str] | None = None) -> Settings:
    """Read the settings. Raises `SettingsError` with one sentence."""
    env = dict(os.environ if environment is None else environment)
    chosen = _chosen(path, env)
    document = _read(chosen)
    if "GYRE_STATE_DIR" in env:
        document["state_dir"] = env["GYRE_STATE_DIR"]
    for name, value in sorted(env.items()):
        if name.startswith(PREFIX) and name not in OUTSIDE:
            _place(document, name, value)
    try:
        return Settings.model_validate(document)
    except ValidationError as error:
        raise SettingsError(_sentence(error, chosen)) from error


def is_set(settings: Settings, section: str) -> bool:
    """Whether the URL of `section` was set, and is not the default."""
    return section in settings.model_fields_set and "url" in getattr(settings, section).model_fields_set


def state_dir(path: Path | None = None, environment: dict[str, str] | None = None) -> Path:
    """Where the state is, whatever the other settings are: a stack can be found and stopped that they would not start.

    Raises `SettingsError` where the file cannot be read, or says of the directory what can be none.
    """
    env = dict(os.environ if environment is None else environment)
    if "GYRE_STATE_DIR" in env:
        return Path(env["GYRE_STATE_DIR"])
    chosen = _chosen(path, env)
    found = _read(chosen).get("state_dir", Settings.model_fields["state_dir"].default)
    if not isinstance(found, str | Path):
        raise SettingsError(f"setting state_dir is {found!r}{_source(chosen)}: {allowed('path_type', {})}")
    return Path(found)


def _chosen(path: Path | None, environment: dict[str, str]) -> Path | None:
    return path or (Path(environment["GYRE_CONFIG"]) if environment.get("GYRE_CONFIG") else None)


def _read(chosen: Path | None) -> dict[str, Any]:
    return _read_toml(chosen) if chosen else _read_toml(Path("gyre.toml"), optional=True)


def _source(chosen: Path | None) -> str:
    return f" (in {chosen} or the environment)" if chosen else ""


def _read_toml(path: Path, *, optional: bool = False) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if optional:
            return {}
        raise SettingsError(f"settings file {path} does not exist") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"settings file {path} is not valid TOML: {error}") from error
    except OSError as error:
        raise SettingsError(f"settings file {path} cannot be read: {error.strerror}") from error


def _place(document: dict[str, Any], name: str, value: str) -> None:
    section, _, key = name.removeprefix(PREFIX).lower().partition("__")
    sections = {n: f.annotation for n, f in Settings.model_fields.items() if n != "state_dir"}
    if section not in sections:
        raise SettingsError(
            f"environment variable {name}: there is no section {section!r}; allowed: {', '.join(sections)}"
        )
    kind = sections[section]
    assert isinstance(kind, type)
    assert issubclass(kind, Section)
    if key not in kind.model_fields:
        raise SettingsError(
            f"environment variable {name}: there is no key {key!r}; allowed: {', '.join(kind.model_fields)}"
        )
    target = document.setdefault(section, {})
    if not isinstance(target, dict):
        raise SettingsError(f"{section} must be a table")
    many = "tuple" in str(kind.model_fields[key].annotation)
    target[key] = _texts(name, value) if many else value


def _texts(name: str, value: str) -> tuple[str, ...]:
    """A list of the environment: JSON, by which a text can hold a comma, or texts with commas between them."""
    if not value.lstrip().startswith("["):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        # Not what it is: it may be a key.
        raise SettingsError(
            f"environment variable {name} begins with [ and is no JSON list of texts; "
            'allowed is one like ["a", "b"], or texts with commas between them'
        )
    return tuple(found)


def _sentence(error: ValidationError, path: Path | None) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    model, field = _named(first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown setting {where}{_source(path)}; allowed here: {', '.join(model.model_fields)}"
    said = allowed(first["type"], first.get("ctx", {}), field) or first["msg"]
    value = "not allowed" if field is not None and "Secret" in str(field.annotation) else masked(repr(first["input"]))
    return f"setting {where} is {value}{_source(path)}: {said}"


def _named(loc: tuple[int | str, ...]) -> tuple[type[BaseModel], FieldInfo | None]:
    """The section that an error is about, and its field; none of an unknown name."""
    model: type[BaseModel] = Settings
    field: FieldInfo | None = None
    for part in loc:
        if isinstance(part, int):  # an entry of a list; the field is the list's
            break
        if field is not None and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            model = field.annotation
        field = model.model_fields.get(part)
    return model, field
