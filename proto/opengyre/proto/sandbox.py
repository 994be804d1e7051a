"""Requests and answers of the sandbox service.

Subjects: ``gyre.v1.rpc.sandbox.any.create`` (one of the replicas takes it) and
``gyre.v1.rpc.sandbox.<node>.<verb>`` for everything about a sandbox that lives on ``node``
(``SandboxRef.node``), with the verbs of `VERBS`.

Every call may be repeated: create by ``sandbox``, exec and spawn by ``exec_id``, verify by ``verify_id``, snapshot by
``snapshot``, fork by the new ids; a repeated call answers what the first one did or joins it while it runs, and changes
nothing. Durations are in seconds. Background commands are in `opengyre.proto.sandbox_jobs`, directories, snapshots and
forks in `opengyre.proto.sandbox_trees`, images in `opengyre.proto.sandbox_images`.
"""

from collections.abc import Mapping
from typing import Literal

from opengyre.proto.base import Record
from opengyre.proto.subjects import rpc
from opengyre.proto.task import Check, Healthcheck, TaskEnvironment, TaskTests

SERVICE = "sandbox"
VERBS = (
    *("exec", "verify", "prepare", "renew", "destroy", "list", "read", "write", "stat", "forward", "info"),
    *("spawn", "poll", "logs", "kill"),
    *("put", "get", "snapshot", "fork", "restore", "drop"),
    *("images", "add_image", "remove_image"),
)

# `RpcError.kind` of this service.
ErrorKind = Literal[
    "sandbox_gone",  # it never was, was destroyed or its lease ran out: the episode cannot go on in it
    "sandbox_busy",  # the same id is used for something else just now; trying again later may work
    "exec_timeout",  # a call of the service's own needed too long (a command's timeout is a result, not an error)
    "output_limit",  # a file or an answer is larger than the cap that the caller gave
    "infra_error",  # the machine, not the command: never an observation, never a zero
    "invalid_request",  # a field is not allowed, or the node's backend cannot do it; the message names it
]


def create_subject() -> str:
    """Where a sandbox is asked for; any replica answers."""
    return rpc(SERVICE, "any", "create")


def node_subject(node: str, verb: str) -> str:
    """Where the sandboxes of ``node`` are reached; ``verb`` is one of `VERBS`."""
    return rpc(SERVICE, node, verb)


class Capabilities(Record, frozen=True, kw_only=True):
    """What a backend can do on this node. What it cannot do it refuses (``invalid_request``, naming the field)."""

    backend: str
    """``bubblewrap`` or ``docker``."""
    isolated: bool
    """Sandboxes have namespaces of their own."""
    network_none: bool
    """A sandbox can be without network."""
    network_allowlist: bool
    """A sandbox can reach named hosts and no others."""
    fork: bool
    """New sandboxes can be made from a snapshot."""
    snapshot: bool
    """The files of a sandbox can be kept, and put back into it."""
    disk_limit: bool
    """``disk_mb`` is enforced."""
    cpu_limit: bool
    """``cpus`` is enforced."""
    memory_limit: bool
    """``memory_mb`` is enforced for all processes and files of a sandbox together."""
    pids_limit: bool
    """``pids`` is enforced."""
    images: bool
    """``image`` may be a name."""
    root_directories: bool
    """``image`` may be the absolute path of a root directory on the node."""
    background: bool
    """Commands can be spawned, and survive a crash of the service."""
    users: bool
    """Commands can run as other users than the sandbox's own."""


class SandboxSpec(Record, frozen=True, kw_only=True):
    """What a sandbox shall be (verb ``create``, answered by `SandboxRef`)."""

    sandbox: str
    """Id given by the caller (execution id and attempt), ``[A-Za-z0-9_-]{1,96}``; create is idempotent by it."""
    owner: str
    """Who holds the lease: the service instance or the execution that it is for."""
    labels: Mapping[str, str] = {}
    """``run``, ``group``, ``execution`` and whatever else shall be found again by ``list``."""
    files: Mapping[str, str] = {}
    """Text files to start with; a path is relative to ``/workspace`` or lies under it."""
    env: Mapping[str, str] = {}
    """Environment of every command, beside PATH, HOME, LANG and TERM."""
    workspace_mb: int | None = None
    """Size of ``/workspace``, and of ``/tmp``, in MiB; None takes the node's setting (16)."""
    memory_mb: int | None = None
    """Memory of all its processes and files together, in MiB; None takes the node's setting (256)."""
    pids: int | None = None
    """Most processes and threads at once; None takes the node's setting (64)."""
    image: str | None = None
    """Its root: a name in the node's image cache, or the absolute path of a root directory on the node; None shows the
    node's own system folders, read-only."""
    network: Literal["none", "allowlist"] = "none"
    """``allowlist`` reaches ``allowed_hosts`` only."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names, ``*.name`` (what is below it), addresses or networks, without ports; with ``allowlist`` only. An
    address that is not public has to be listed itself, or by a network without a public address."""
    cpus: float | None = None
    """Processors' worth of time at most; None is not limited."""
    disk_mb: int | None = None
    """Size of all that is written to its root, in MiB; with ``image`` only; None is 1024, where enforced. What the
    disk has not taken yet counts as memory: who writes much more than ``memory_mb`` at once may be ended for it."""
    workdir: str | None = None
    """Where commands start, an absolute path; None is ``/workspace``, or the image's own."""
    user: str | None = None
    """Who runs commands, a name or a number; None is the sandbox's own user (``agent``), or the image's own."""
    environment: TaskEnvironment | None = None
    """Made on the node, once for the same one, and then begun with; instead of ``image``, ``workdir`` and ``user``."""
    ttl_s: float = 3600.0
    """It is removed this long after its creation or last renewal, whatever happens."""
    idle_ttl_s: float = 1800.0
    """It is removed this long after its last use."""


class SandboxRef(Record, frozen=True, kw_only=True):
    """Where a sandbox is."""

    sandbox: str
    """Its id."""
    node: str
    """The node that it lives on, a token of the subjects of all further calls."""
    isolated: bool
    """False where the machine allowed no namespaces and a setting permitted to go on without."""
    expires_in_s: float = 0.0
    """Seconds until it is removed, if it is neither used nor renewed."""
    environment: str = ""
    """A sentence: which base its environment has and how it was made; empty without one."""


class ExecRequest(Record, frozen=True, kw_only=True):
    """Run a command by ``sh`` in ``/workspace`` (verb ``exec``, answered by `ExecResult`)."""

    sandbox: str
    """The sandbox's id."""
    exec_id: str
    """Id given by the caller, ``[A-Za-z0-9_-]{1,96}``, unique in its sandbox; the command runs once for it."""
    command: str
    """Shell text, of any length up to 4 MiB."""
    timeout_s: float = 30.0
    """The command and all that it started are killed after this long."""
    output_limit: int = 16384
    """Most bytes of each stream in the answer; what is longer keeps its head and its tail, and ``logs`` has it all."""
    cwd: str | None = None
    """Where it starts, absolute or relative to the sandbox's working folder; None is that."""
    env: Mapping[str, str] = {}
    """Beside the sandbox's own; wins over it."""
    user: str | None = None
    """Who runs it, a name or a number; None is the sandbox's user."""
    stdin: bytes | None = None
    """Its standard input, at most 4 MiB; None is /dev/null."""
    no_output_timeout_s: float | None = None
    """It is killed as well after this long without a byte of output; None does not look at that."""


class ExecResult(Record, frozen=True, kw_only=True):
    """What a command did."""

    exec_id: str
    """The request's id."""
    exit_code: int | None
    """Exit status (128 + signal where one ended it); None where it was killed for time or for its output."""
    stdout: str
    """Text of the stream, invalid UTF-8 replaced, the middle cut out where it was too long."""
    stderr: str
    """The same for standard error."""
    stdout_bytes: int
    """Bytes that the command wrote, kept or not."""
    stderr_bytes: int
    """Bytes that the command wrote, kept or not."""
    stdout_truncated: bool
    """Something of stdout is missing here."""
    stderr_truncated: bool
    """Something of stderr is missing here."""
    timed_out: bool
    """It ran into its timeout and was killed."""
    killed_by: str | None = None
    """``timeout``, ``no_output``, ``output`` (a flood), ``kill`` or ``destroy``; None where it ended itself."""
    duration_s: float
    """From start to end, monotonic."""
    isolated: bool
    """Whether it ran in namespaces of its own."""
    oom: bool = False
    """The kernel ended a process of the sandbox for its memory limit meanwhile."""


class VerifyRequest(Record, frozen=True, kw_only=True):
    """Run checks on what was done in a sandbox (verb ``verify``, answered by `VerifyResult`).

    One at a time for a sandbox: beside another it is ``sandbox_busy``. A node whose sandboxes are not isolated takes
    ``shared`` only, the others are an ``invalid_request`` there.
    """

    sandbox: str
    """The sandbox's id."""
    verify_id: str
    """Id given by the caller; the checks run once for it."""
    checks: tuple[Check, ...] = ()
    """Commands whose exit code 0 means passed; names are unique."""
    tests: TaskTests | None = None
    """A verifier that is a program, instead of checks."""
    timeout_s: float = 30.0
    """For each check; tests have their own."""
    mode: Literal["shared", "separate", "live"] = "shared"
    """``shared``: in the sandbox itself, once all that was left running in it has been ended. ``separate``: that is
    ended as well, then ``/workspace`` is copied into a new sandbox in which nothing but the checks ever runs, and which
    is removed with the answer; regular files, folders and links are copied, and HOME is ``/tmp`` there. ``live``: as
    ``separate``, but nothing is ended: the sandbox goes on meanwhile as if nothing had been asked."""


class CheckResult(Record, frozen=True, kw_only=True):
    """One check's outcome, or one reward of tests."""

    name: str
    """The check's name, or the reward's."""
    passed: float
    """1.0 or 0.0, a reward anything in between; 0.0 without meaning where ``error`` is set."""
    weight: float
    """The check's weight."""
    output: str = ""
    """First bytes of what it wrote."""
    error: str | None = None
    """Why it could not be evaluated (late, killed); then the whole result is not valid."""


class TestOutcome(Record, frozen=True, kw_only=True):
    """One test of a report that a verifier left."""

    __test__ = False  # pytest collects classes of this name

    name: str
    """As the report names it."""
    outcome: Literal["passed", "failed", "skipped"]
    """``failed`` is also a test that broke."""


class VerifyResult(Record, frozen=True, kw_only=True):
    """What the checks said. A failed evaluation is not a zero: look at ``valid`` first."""

    verify_id: str
    """The request's id."""
    parts: tuple[CheckResult, ...]
    """In the order of the checks; those after an infrastructure error are missing."""
    passed: int
    """Number of checks passed; of tests, as their reports count, else of rewards that are 1 or more."""
    total: int
    """Number of checks asked for; of tests, those that were not skipped."""
    valid: bool
    """Every check was evaluated, so that a score may be taken from ``parts``."""
    infra_error: str | None = None
    """The sentence, where not valid."""
    isolated: bool = True
    """Whether they ran in namespaces of their own."""
    rewards: Mapping[str, float] = {}
    """What tests left, as they left it; empty for checks."""
    baseline: int = 0
    """Tests that pass with nothing done, as asked."""
    progress: float | None = None
    """The part of the tests that was gained over the baseline, 0 to 1; None where nothing counts tests."""
    report: tuple[TestOutcome, ...] = ()
    """The tests that reports name, the first 500."""
    output: str = ""
    """Head and tail of what the tests printed."""
    environment: str = ""
    """Which base they ran on and how it was made; empty without an environment."""


class PrepareRequest(Record, frozen=True, kw_only=True):
    """Make a sandbox ready for a step of a task (verb ``prepare``, answered by `PrepareResult`): bring its files, run
    its setup, wait for its health check. Nothing else may be asked of it meanwhile.
    """

    sandbox: str
    """The sandbox's id."""
    prepare_id: str
    """Id given by the caller; done once for it."""
    files: bytes = b""
    """For the folder where commands start: a tar archive, compressed by gzip."""
    setup: str | None = None
    """A command that is run there then."""
    healthcheck: Healthcheck | None = None
    """Waited for at last."""


class PrepareResult(Record, frozen=True, kw_only=True):
    """The sandbox is ready, or the step cannot begin in it."""

    prepare_id: str
    """The request's id."""
    fault: str | None = None
    """The sentence, where its files or its setup failed; a health check that fails is an ``infra_error``."""


class RenewRequest(Record, frozen=True, kw_only=True):
    """Lengthen a lease (verb ``renew``, answered by `SandboxRef`); it never gets shorter."""

    sandbox: str
    """The sandbox's id."""
    owner: str | None = None
    """The new owner, where it changes hands."""
    ttl_s: float = 3600.0
    """From now."""


class DestroyRequest(Record, frozen=True, kw_only=True):
    """End a sandbox (verb ``destroy``, answered by `DestroyResult`); waits for nothing that runs in it."""

    sandbox: str
    """The sandbox's id."""


class DestroyResult(Record, frozen=True, kw_only=True):
    """After this nothing of it is left."""

    sandbox: str
    """The sandbox's id."""
    existed: bool
    """False where there was none."""


class ListRequest(Record, frozen=True, kw_only=True):
    """Find sandboxes (verb ``list``, answered by `ListResult`)."""

    labels: Mapping[str, str] = {}
    """Only those that carry all of these."""


class NetworkUse(Record, frozen=True, kw_only=True):
    """What a sandbox with an allow-list did with it, since its node's service began to answer there."""

    allowed_hosts: tuple[str, ...]
    """As created."""
    requests: int
    """Connections that asked for a host."""
    denied: int
    """Those whose host is not allowed."""
    sent_bytes: int
    """To hosts."""
    received_bytes: int
    """From hosts."""
    denials: Mapping[str, int] = {}
    """How often, by ``host:port``; of the first 64 of these."""


class SandboxInfo(Record, frozen=True, kw_only=True):
    """A live sandbox (verb ``stat`` answers one)."""

    sandbox: str
    """Its id."""
    node: str
    """Its node."""
    owner: str
    """Holder of its lease."""
    labels: Mapping[str, str]
    """As created."""
    isolated: bool
    """Whether it has namespaces of its own."""
    age_s: float
    """Since its creation."""
    expires_in_s: float
    """Until it is removed, if neither used nor renewed."""
    execs: int
    """Commands recorded for it."""
    running: tuple[str, ...]
    """Ids of the commands that run just now."""
    network: NetworkUse | None = None
    """None without a network."""


class ListResult(Record, frozen=True, kw_only=True):
    """Live sandboxes of one node."""

    sandboxes: tuple[SandboxInfo, ...]
    """In order of creation."""


class StatRequest(Record, frozen=True, kw_only=True):
    """Look at a sandbox (verb ``stat``, answered by `SandboxInfo`)."""

    sandbox: str
    """The sandbox's id."""


class ReadRequest(Record, frozen=True, kw_only=True):
    """Read a regular file (verb ``read``, answered by `ReadResult`)."""

    sandbox: str
    """The sandbox's id."""
    path: str
    """Relative to ``/workspace``, or absolute under ``/workspace``, ``/tmp`` or ``/logs``; with an image, any."""
    limit: int = 1 << 20
    """Most bytes; a larger file is an ``output_limit`` error. More than 4 MiB need ``blob``."""
    blob: bool = False
    """Answer a reference into the blob store instead of the bytes."""


class ReadResult(Record, frozen=True, kw_only=True):
    """A file's content."""

    data: bytes
    """Its bytes (base64 in JSON); empty where ``blob`` is set."""
    blob: str | None = None
    """``sha256:...``, where a blob was asked for."""
    size: int | None = None
    """Bytes of the file, where a blob was asked for."""


class WriteRequest(Record, frozen=True, kw_only=True):
    """Write a regular file, making its folders (verb ``write``, answered by `WriteResult`)."""

    sandbox: str
    """The sandbox's id."""
    path: str
    """As in `ReadRequest`."""
    data: bytes = b""
    """Its bytes (base64 in JSON), at most 4 MiB."""
    mode: int = 0o644
    """Permission bits."""
    blob: str | None = None
    """Reference of its bytes in the blob store, instead of ``data``."""


class WriteResult(Record, frozen=True, kw_only=True):
    """A file was written."""

    path: str
    """Absolute path in the sandbox."""
    size: int
    """Bytes written."""


class ForwardRequest(Record, frozen=True, kw_only=True):
    """Let what runs in a sandbox reach one address outside (verb ``forward``, answered by `ForwardResult`).

    The sandbox has no network: connections to ``port`` of its own loopback are carried to ``host``:``target_port`` by
    the service, and to nowhere else. Asked again, a port is pointed to the new address; connections that are open stay.
    A service that starts again has forgotten it: whoever needs it asks now and then.
    """

    sandbox: str
    """The sandbox's id."""
    port: int
    """1024 to 65535; where the sandbox is not isolated, a port of the machine's loopback."""
    host: str
    """Host name or address, as the service's machine knows it."""
    target_port: int
    """1 to 65535."""


class ForwardResult(Record, frozen=True, kw_only=True):
    """The port is open."""

    port: int
    """As asked for."""


class InfoRequest(Record, frozen=True, kw_only=True):
    """Ask what a node is (verb ``info``, answered by `NodeInfo`)."""


class NodeInfo(Record, frozen=True, kw_only=True):
    """A node, found by ``nats micro ls`` under the names ``gyre-sandbox-<node>``."""

    node: str
    """Its name, a token of the subjects."""
    capabilities: Capabilities
    """What its backend can do."""
    unenforced: tuple[str, ...]
    """Sentences: what a spec may ask for and this machine cannot hold."""
    sandboxes: int
    """How many it holds."""
    max_sandboxes: int
    """How many it may hold."""
    images: tuple[str, ...] = ()
    """Names in its image cache."""
