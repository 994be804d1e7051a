"""What happened in an execution (stream TRAJ): the log from which everything can be rebuilt.

One writer an execution: the replica of `rollout` that holds it. Every event carries `index`, its place in the
execution's log from 0 without gaps, and is appended with the expected last sequence of the execution's subjects, so
that a writer that was replaced is refused. An attempt is one writer's tenure.
"""

from typing import ClassVar, Literal, TypeVar

import msgspec

from opengyre.proto import subjects
from opengyre.proto.base import Event, Record
from opengyre.proto.episode import EpisodeDispatch

EndReason = Literal["done", "turn_budget", "token_budget", "time_budget", "overflow", "agent_error", "infra"]


class VersionSpan(Record, frozen=True, kw_only=True):
    """Tokens `[start, end)` of a completion were sampled by this weight version."""

    version: int
    start: int
    end: int


class TrajEvent(Event, frozen=True, kw_only=True):
    stream: ClassVar[str] = subjects.TRAJ
    run: str
    group: str
    execution: str
    index: int
    """Place in the execution's log, from 0, without gaps."""
    attempt: int
    """Which writer, from 0."""
    step: int | None = None
    """Which of its task's steps it belongs to, from 0. None: the task has none."""

    def event_id(self) -> str:
        return f"traj-{self.execution}-{self.index}-{self.attempt}"


class Started(TrajEvent, frozen=True, kw_only=True, tag="traj.started.v1"):
    """The first event of an execution's log (attempt 0), with the dispatch that it answers."""

    dispatch: EpisodeDispatch
    replica: str
    vocabulary: int | None = None
    """How many token ids the policy has. None: not known here, and checked by the trainer only."""

    def event_id(self) -> str:
        """Two replicas that begin at once must not take each other's append for their own."""
        return f"{super().event_id()}-{self.replica}"


class TakenOver(TrajEvent, frozen=True, kw_only=True, tag="traj.taken_over.v1"):
    """Another replica (or the same, started again) continues from the log; the former writer is fenced off."""

    replica: str

    def event_id(self) -> str:
        """As of `Started`: rivals choose the same index and attempt."""
        return f"{super().event_id()}-{self.replica}"


class SandboxOpened(TrajEvent, frozen=True, kw_only=True, tag="traj.sandbox.v1"):
    sandbox: str
    node: str
    isolated: bool
    lane: int | None = None
    """Whose it is; None: the trunk's."""


class Forked(TrajEvent, frozen=True, kw_only=True, tag="traj.forked.v1"):
    """From here on the execution is several lanes, alternatives of each other (`harness.branching`).

    What they have done before is the trunk's; events of a lane carry its number, and each lane is verified by itself.
    """

    turn: int
    """Turns of the trunk."""
    copies: int
    """Lanes, numbered from 0."""
    snapshot: str | None
    """Of the trunk's sandbox, on its node; None where it could not be taken: the lanes' are made from the log."""


class Stepped(TrajEvent, frozen=True, kw_only=True, tag="traj.stepped.v1"):
    """A step of the task begins: what comes with it is in the sandbox, and the agent is told its instruction."""

    name: str
    """The step's."""


class ToolCall(Record, frozen=True, kw_only=True):
    """A tool call that the model made, as the agent was given it."""

    id: str
    """Unique in the execution; the agent's later requests name it."""
    name: str
    arguments: str
    """The JSON text that was sampled, byte for byte."""


class Media(Record, frozen=True, kw_only=True):
    """An image or such in a prompt. Two of the same placeholder tokens are not the same prompt."""

    position: int
    """Place in the whole prompt of the first token that stands for it."""
    hash: str
    """Of its content, as the engine names it."""


class Routes(Record, frozen=True, kw_only=True):
    """Which experts a policy of many experts took, as the engine recorded it, for training to take the same.

    The last sampled token was not run through the model when the call ended, so its row is not here: the call that goes
    on from there has it, from its prefill.
    """

    blob: str
    """`sha256:...` of the rows, one a token."""
    start: int
    """Place on the path (prompt and completion) of the first row's token: at most `prefix_tokens`, and below where the
    parent ended without the row of its last token."""
    rows: int
    versions: tuple[VersionSpan, ...]
    """Of the sampled tokens: the weight versions that these rows are of. Training needs the log-probs' to be the same;
    a call that was sampled again in part after it was moved has mixed ones."""


class Bulk(Record, frozen=True, kw_only=True):
    """Where the ids of a call are that are too large for a message."""

    blob: str
    """`sha256:...` of JSON with `prompt_ids`, `sampled_ids` and `logprobs`, which the event has empty."""
    prompt_ids: int
    """How many."""
    sampled_ids: int


class BulkIds(Record, frozen=True, kw_only=True):
    """The content of such a blob."""

    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


Transition = Literal["root", "extend", "branch", "realign", "fork"]
"""How a prompt stands to the calls before it. `extend`: it begins with all of its parent. `realign`: so it does after a
history that was written differently was put back in its own tokens. `fork`: the history was rewritten. `branch`: it
shares a beginning only. `root`: it shares nothing."""


class Call(TrajEvent, frozen=True, kw_only=True, tag="traj.call.v1"):
    """One model call: token ids in, token ids out."""

    call: str
    """Identifier, unique in the execution."""
    turn: int
    request_digest: str
    """SHA-256 of the client's request body, for answering a retry from the log."""
    parent: str | None
    """The call that shares the longest beginning with this prompt."""
    prefix_tokens: int
    """How many leading tokens of the prompt are those of the parent's prompt and completion: where it diverges, if
    that is less than the whole of it."""
    prompt_ids: tuple[int, ...]
    """The prompt's new token ids, after the prefix."""
    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Behaviour log-prob of each sampled token, natural logarithm, of the distribution that was sampled from."""
    versions: tuple[VersionSpan, ...]
    temperature: float
    finish_reason: Literal["stop", "length"]
    text: str
    """The completion's text, up to the stop string."""
    hosts: tuple[str, ...]
    """Which hosts sampled it, in order; more than one when it was moved."""
    parked_s: float = 0.0
    """How long it waited because no host was in the rollout role."""
    moves_s: tuple[float, ...] = ()
    """Of each move to another host: how long nobody worked on it, without parking."""
    duration_s: float = 0.0
    """From the request to the answer, parking included."""
    role: Literal["main", "main-summary", "sub-agent", "sub-agent-summary"] | None = None
    """By the harness's profile; None: the shape of the tree tells it."""
    history_digest: str = ""
    """SHA-256 chain over the messages up to and including the answer: a request whose messages begin with these
    extends this call, also for a writer that took over and never saw them."""
    api: Literal["chat", "completions", "messages"] = "chat"
    """By which API it was asked for."""
    choice: int = 0
    """Which of the request's choices it is, from 0."""
    choices: int = 1
    """How many choices the request asked for: siblings that were all wanted."""
    content: str | None = None
    """What the agent saw beside the tool calls; None: `text`."""
    tool_calls: tuple[ToolCall, ...] = ()
    stop: str | None = None
    """The stop string that ended it; what was sampled after its last token is not here."""
    transition: Transition | None = None
    forced: int = 0
    """How many of the prompt's last tokens begin the answer: put there because the request forces a tool call, part of
    what the agent sees, sampled by nobody."""
    adapter: str | None = None
    """The adapter that it was sampled under; None: none."""
    media: tuple[Media, ...] = ()
    """Of the prompt's new tokens, by place."""
    routes: Routes | None = None
    bulk: Bulk | None = None
    """Where the ids are if they are not here."""
    lane: int | None = None
    """Which lane asked; None: the trunk."""


C = TypeVar("C", bound=Call)


def unpack(call: C, content: bytes) -> C:
    """The call with its ids, from the content of its blob. Raises `msgspec.DecodeError` for what is none."""
    ids = msgspec.json.decode(content, type=BulkIds)
    return msgspec.structs.replace(
        call, prompt_ids=ids.prompt_ids, sampled_ids=ids.sampled_ids, logprobs=ids.logprobs, bulk=None
    )


PROGRAM = -1
"""`ToolResult.turn` of the end of an agent program."""


class ToolResult(TrajEvent, frozen=True, kw_only=True, tag="traj.tool.v1"):
    """One command of the agent, run in the sandbox, or the agent itself where it is a program."""

    turn: int
    """The call that asked for it; `PROGRAM`: it is the program."""
    exec_id: str
    command: str
    exit_code: int | None
    output: str
    """What the agent was shown."""
    output_bytes: int
    """How much there was."""
    timed_out: bool
    duration_s: float = 0.0
    lane: int | None = None
    """Whose command it is, `turn` then counts from the execution's begin along the lane; None: the trunk's."""


class Suspended(TrajEvent, frozen=True, kw_only=True, tag="traj.suspended.v1"):
    """A call is parked: no host is in the rollout role. The sandbox's lease is kept."""

    turn: int


class Resumed(TrajEvent, frozen=True, kw_only=True, tag="traj.resumed.v1"):
    turn: int
    waited_s: float


class Part(Record, frozen=True, kw_only=True):
    """One named part of a verifier's result, on the fixed scale 0 to 1."""

    name: str
    weight: float
    value: float
    output: str = ""


class Progressed(TrajEvent, frozen=True, kw_only=True, tag="traj.progressed.v1"):
    """What the work was worth at a point of the execution, measured out of the policy's reach: a potential that
    credits the calls before it, never the score."""

    turn: int
    """Calls that were recorded before it: 0 at the start."""
    call: str | None
    """The last of them."""
    parts: tuple[Part, ...]
    infra_error: str | None = None
    """It could not be measured: it says nothing."""
    duration_s: float = 0.0


class Verified(TrajEvent, frozen=True, kw_only=True, tag="traj.verified.v1"):
    """What the verifier found in the sandbox. The score itself is computed by `trajectory`."""

    parts: tuple[Part, ...]
    infra_error: str | None = None
    """The evaluation itself failed: this is not a zero."""
    evaluations: int = 1
    """How often it was evaluated, the failed ones with it."""
    reason: EndReason | None = None
    """Why the agent ended, for a writer that takes over before `Ended`."""
    detail: str | None = None
    lane: int | None = None
    """Whose work it is; None: the execution has no lanes."""
    goes_on: bool = False
    """Of a step, after which the next one begins: `parts` are those of the steps so far, with their shares of the whole
    score. Without it, they are those of all steps."""


class Ended(TrajEvent, frozen=True, kw_only=True, tag="traj.ended.v1"):
    reason: EndReason
    detail: str | None = None
    turns: int
    sampled_tokens: int
    duration_s: float
    members: tuple[str, ...]
    """All executions of the group, so that a reader of this event alone knows when the group is whole."""


class Overdue(Event, frozen=True, kw_only=True, tag="traj.overdue.v1"):
    """A mark in a group's log: from here on the group closes as soon as enough members have a score.

    Of no execution: its subject stands at `all`, and holds one message at most. `trajectory` writes it.
    """

    stream: ClassVar[str] = subjects.TRAJ
    run: str
    group: str

    def event_id(self) -> str:
        return f"traj-{self.group}-overdue"


AnyTrajEvent = (
    Started
    | TakenOver
    | SandboxOpened
    | Forked
    | Stepped
    | Call
    | ToolResult
    | Suspended
    | Resumed
    | Progressed
    | Verified
    | Ended
)
