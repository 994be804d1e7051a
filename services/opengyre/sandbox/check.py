"""What a request may hold. Pure: each function returns the value as it is to be used or raises `InvalidRequest`."""

import posixpath
import re
from collections.abc import Mapping, Sequence

from opengyre.proto.sandbox import Capabilities, ExecRequest, ForwardRequest, PrepareRequest, SandboxSpec, VerifyRequest
from opengyre.proto.sandbox_jobs import SpawnRequest
from opengyre.proto.sandbox_trees import ForkRequest
from opengyre.sandbox import allowlist
from opengyre.sandbox.core import InvalidRequest, Options, Spec, unsupported

ROOTS = ("/workspace", "/tmp", "/logs")  # noqa: S108 - the sandbox's own
COMMAND_LIMIT = 4 << 20
OUTPUT_LIMIT = 1 << 20
FILE_LIMIT = 4 << 20
ENV_LIMIT = 16 << 10
BLOB_LIMIT = 4 << 30
MOST_FORKS = 64
_ID = re.compile(r"[A-Za-z0-9_-]{1,96}")
_IMAGE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.:-]{0,127}")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}(:[0-9]{1,5})?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = ("GYRE_EXEC", "GYRE_SANDBOX")


def identifier(field: str, value: str) -> str:
    """An id that is one subject token and one file name."""
    if not _ID.fullmatch(value):
        raise InvalidRequest(f"{field} is {value[:120]!r}; allowed are 1 to 96 of A-Z, a-z, 0-9, _ and -")
    return value


def image_name(value: str) -> str:
    """A name in the image cache, which is one file name."""
    if not _IMAGE.fullmatch(value):
        raise InvalidRequest(
            f"image is {value[:120]!r}; allowed are 1 to 128 of A-Z, a-z, 0-9, _, . : and -, no dot first"
        )
    return value


def image_reference(value: str) -> str:
    """A name that a backend may know an image by: parts as of `image_name`, with slashes between them."""
    if len(value) > 255:
        raise InvalidRequest(f"image is {value[:120]!r}...; allowed are 255 characters")
    for part in value.split("/"):
        image_name(part)
    return value


def between(field: str, value: float, low: float, high: float) -> None:
    """A number in a range; NaN is in none."""
    if not low <= value <= high:
        raise InvalidRequest(f"{field} is {value:g}; allowed is {low:g} to {high:g}")


def path(field: str, value: str, *, anywhere: bool = False, folder: bool = False) -> str:
    """Absolute path in the sandbox, under one of `ROOTS`; ``anywhere``: it has a root of its own; ``folder``: one of
    `ROOTS` itself is allowed too.
    """
    full = posixpath.normpath(posixpath.join("/workspace", value))
    under = anywhere or any(full.startswith(f"{root}/") or (folder and full == root) for root in ROOTS)
    if not value or "\0" in value or len(value) > 4000 or not under or (full == "/" and not folder):
        where = "anywhere in the sandbox" if anywhere else "under /workspace, /tmp or /logs"
        raise InvalidRequest(f"{field} is {value[:200]!r}; allowed is a {'folder' if folder else 'file'} {where}")
    return full


def spec(value: SandboxSpec, defaults: Spec) -> tuple[Spec, dict[str, str]]:
    """A new sandbox with the node's ``defaults`` for what is not said, and its files by absolute path."""
    identifier("sandbox", value.sandbox)
    if not value.owner or len(value.owner) > 200:
        raise InvalidRequest("owner is empty or too long; allowed are 1 to 200 characters")
    made = Spec(
        sandbox=value.sandbox,
        env=value.env,
        workspace_mb=defaults.workspace_mb if value.workspace_mb is None else value.workspace_mb,
        memory_mb=defaults.memory_mb if value.memory_mb is None else value.memory_mb,
        pids=defaults.pids if value.pids is None else value.pids,
        image=value.image,
        network=value.network,
        allowed_hosts=value.allowed_hosts,
        cpus=value.cpus,
        disk_mb=value.disk_mb,
        workdir=value.workdir,
        user=value.user,
    )
    _optional(made)
    between("workspace_mb", made.workspace_mb, 1, 1 << 16)
    between("memory_mb", made.memory_mb, 16, 1 << 20)
    between("pids", made.pids, 4, 1 << 15)
    between("ttl_s", value.ttl_s, 0.05, 30 * 86400)
    between("idle_ttl_s", value.idle_ttl_s, 0.05, 30 * 86400)
    environment(value.env)
    files = {path("files", name, anywhere=made.image is not None): text for name, text in value.files.items()}
    size = sum(len(text.encode("utf-8", "surrogateescape")) for text in files.values())
    if size > made.workspace_mb << 20:
        raise InvalidRequest(f"files hold {size} bytes; allowed are workspace_mb = {made.workspace_mb} MiB")
    return made, files


def _optional(made: Spec) -> None:
    if made.image is not None and not made.image.startswith("/"):
        image_reference(made.image)
    if made.cpus is not None:
        between("cpus", made.cpus, 0.01, 1024)
    if made.disk_mb is not None:
        between("disk_mb", made.disk_mb, 1, 1 << 20)
    if made.workdir is not None and (not made.workdir.startswith("/") or "\0" in made.workdir):
        raise InvalidRequest(f"workdir is {made.workdir[:200]!r}; allowed is an absolute path")
    user("user", made.user)
    if made.allowed_hosts and made.network != "allowlist":
        raise InvalidRequest("allowed_hosts are given; allowed are they with network = 'allowlist' only")
    hosts(made.allowed_hosts)


def hosts(value: Sequence[str]) -> None:
    """The entries of an allow-list."""
    try:
        allowlist.parse(value)
    except allowlist.HostError as error:
        raise InvalidRequest(str(error)) from error


def user(field: str, value: str | None) -> None:
    """A name or number of a user, with a group's number after a colon, or None."""
    if value is not None and not _USER.fullmatch(value):
        raise InvalidRequest(f"{field} is {value[:100]!r}; allowed is a user's name or number")


def capable(made: Spec, can: Capabilities) -> None:
    """Refuse what the backend cannot do; it is never imitated."""
    needs = [
        ("images", "image", made.image is not None and not made.image.startswith("/")),
        ("root_directories", "image", made.image is not None and made.image.startswith("/")),
        ("network_allowlist", "network 'allowlist'", made.network == "allowlist"),
        ("cpu_limit", "cpus", made.cpus is not None),
        ("disk_limit", "disk_mb", made.disk_mb is not None),
        ("users", "user", made.user is not None),
    ]
    for capability, field, asked in needs:
        if asked and not getattr(can, capability):
            raise unsupported(capability, field, can.backend)


def options(value: ExecRequest | SpawnRequest) -> Options:
    """How a command runs, beside its text and bounds."""
    if value.cwd is not None and (not value.cwd or "\0" in value.cwd or len(value.cwd) > 4000):
        raise InvalidRequest(f"cwd is {value.cwd[:200]!r}; allowed is a path of at most 4000 characters")
    environment(value.env)
    user("user", value.user)
    if value.stdin is not None and len(value.stdin) > FILE_LIMIT:
        raise InvalidRequest(f"stdin has {len(value.stdin)} bytes; allowed are {FILE_LIMIT}")
    if value.no_output_timeout_s is not None:
        between("no_output_timeout_s", value.no_output_timeout_s, 0.05, 86400)
    return Options(
        cwd=value.cwd,
        env=value.env,
        user=value.user,
        stdin=value.stdin,
        no_output_timeout_s=value.no_output_timeout_s,
    )


def forking(value: ForkRequest) -> None:
    """All fields of a fork."""
    identifier("snapshot", value.snapshot)
    if not 1 <= len(value.sandboxes) <= MOST_FORKS or len(set(value.sandboxes)) < len(value.sandboxes):
        raise InvalidRequest(f"sandboxes are {len(value.sandboxes)}; allowed are 1 to {MOST_FORKS} different ids")
    for name in value.sandboxes:
        identifier("sandboxes", name)
    if not value.owner or len(value.owner) > 200:
        raise InvalidRequest("owner is empty or too long; allowed are 1 to 200 characters")
    between("ttl_s", value.ttl_s, 0.05, 30 * 86400)
    between("idle_ttl_s", value.idle_ttl_s, 0.05, 30 * 86400)


def environment(value: Mapping[str, str]) -> None:
    """Variables of a command or a sandbox."""
    for name, text in value.items():
        if not _VARIABLE.fullmatch(name) or name in _RESERVED or "\0" in text:
            raise InvalidRequest(f"env has {name[:100]!r}; allowed are shell variable names other than {_RESERVED}")
    if sum(len(name) + len(text) for name, text in value.items()) > ENV_LIMIT:
        raise InvalidRequest(f"env is too long; allowed are {ENV_LIMIT} characters together")


def command(value: str) -> None:
    """Text for the shell."""
    if "\0" in value or len(value) > COMMAND_LIMIT:
        raise InvalidRequest(f"command holds a NUL or is too long; allowed are {COMMAND_LIMIT} characters without NUL")


def job(value: str) -> str:
    """Id of a command that was begun; those of an evaluation have dots."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,200}", value) or value.startswith("."):
        raise InvalidRequest(f"exec_id is {value[:120]!r}; allowed is one of a command of the sandbox")
    return value


def execution(value: ExecRequest | SpawnRequest) -> None:
    """All fields of a command."""
    identifier("exec_id", value.exec_id)
    command(value.command)
    between("timeout_s", value.timeout_s, 0.01, 86400)
    between("output_limit", value.output_limit, 0, OUTPUT_LIMIT)


def forwarding(value: ForwardRequest) -> None:
    """All fields of a forwarding."""
    between("port", value.port, 1024, 65535)
    between("target_port", value.target_port, 1, 65535)
    if not value.host or len(value.host) > 255 or not value.host.isascii() or not value.host.isprintable():
        raise InvalidRequest(f"host is {value.host[:100]!r}; allowed is a host name or an address")


def preparation(value: PrepareRequest) -> None:
    """All fields of a preparation."""
    identifier("prepare_id", value.prepare_id)
    if value.setup is not None:
        command(value.setup)
    if value.healthcheck is not None:
        command(value.healthcheck.command)


def verification(value: VerifyRequest) -> None:
    """All fields of a verification."""
    identifier("verify_id", value.verify_id)
    between("timeout_s", value.timeout_s, 0.01, 86400)
    if value.tests is not None:
        if value.checks:
            raise InvalidRequest("checks are there beside tests; allowed is one of them")
        between("tests.timeout_s", value.tests.timeout_s, 0.01, 86400)
        command(value.tests.command)
        return
    names = [check.name for check in value.checks]
    if not names or len(set(names)) < len(names):
        raise InvalidRequest("checks are none or share a name; allowed is at least one, each with a name of its own")
    for check in value.checks:
        command(check.command)
        between(f"weight of check {check.name[:100]!r}", check.weight, 0, 1e9)
