"""Six small histories on which aggregators differ, ours beside others that are installed elsewhere.

Each is what an endpoint sees: the prompt of each call as messages (role, token ids), and what was sampled.
"""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from opengyre.trees import Given, build, choose, structural

OTHERS = ("agentlightning", "verifiers")
Message = tuple[str, list[int]]
Log = list[tuple[list[Message], list[int]]]


class CaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """`wanted`: sampled tokens that belong in training, each once. `rows`, `tokens`: what is computed."""

    case: str
    by: str
    rows: int
    tokens: int
    trained: int
    wanted: int


def cases(turns: int = 12) -> dict[str, tuple[Log, int]]:
    """Name -> its calls in order, and how many sampled tokens are to be trained."""
    rng = np.random.default_rng(0)

    def ids(count: int) -> list[int]:
        return rng.integers(10, 50_000, size=count).tolist()

    def agent(system: Message, count: int) -> Log:
        messages, log = [system], []
        for _ in range(count):
            messages = [*messages, ("user", ids(60))]
            sampled = ids(40)
            log.append((messages, sampled))
            messages = [*messages, ("assistant", sampled)]
        return log

    def after(log: Log) -> list[Message]:
        messages, sampled = log[-1]
        return [*messages, ("assistant", sampled)]

    system: Message = ("system", ids(100))
    linear = agent(system, turns)
    one, two = agent(system, turns), agent(("system", ids(100)), turns)
    first = agent(system, turns // 2)
    summing = ([*after(first), ("user", ids(20))], ids(40))
    second = agent(("system", [*system[1]]), turns // 2)
    compacted = [([messages[0], ("user", summing[1]), *messages[1:]], sampled) for messages, sampled in second]
    stripped: Log = []
    history: list[Message] = [system]
    for _ in range(turns):
        history = [*history, ("user", ids(60))]
        sampled = ids(40)
        stripped.append((history, sampled))
        history = [*history, ("assistant", sampled[:1] + sampled[20:])]
    begun = agent(system, 3)
    again = (begun[-1][0], ids(40))
    used = ([*again[0], ("assistant", again[1]), ("user", ids(60))], ids(40))
    trunk = agent(system, turns // 2)
    parallel: Log = [([*after(trunk), ("user", ids(60))], ids(40)) for _ in range(3)]
    return {
        "one agent": (linear, _sampled(linear)),
        "two agents in turns": ([call for pair in zip(one, two, strict=True) for call in pair], _sampled(one + two)),
        "compaction": ([*first, summing, *compacted], _sampled([*first, summing, *compacted])),
        "thinking stripped": (stripped, _sampled(stripped)),
        "parallel calls": ([*trunk, *parallel], _sampled([*trunk, *parallel])),
        "a retry": ([*begun, again, used], _sampled([*begun[:-1], again, used])),
    }


def _sampled(log: Log) -> int:
    return sum(len(sampled) for _, sampled in log)


def ours(log: Log) -> tuple[int, int, int]:
    """Rows, their tokens, tokens with a loss."""
    calls = (
        Given(f"c{number:04d}", [t for _, tokens in messages for t in tokens], sampled, order=number)
        for number, (messages, sampled) in enumerate(log)
    )
    nodes = build(calls).nodes
    paths = choose(nodes, structural(nodes)).paths
    return len(paths), sum(path.calls[-1].length for path in paths), sum(path.events for path in paths)


def measure(pythons: Sequence[tuple[str, Path]]) -> list[CaseRow]:
    """Ours, and what each of the others in `pythons` (name, its interpreter) makes. Raises `CalledProcessError`."""
    found = cases()
    answers = {name: _ask(name, python, found) for name, python in pythons}
    rows: list[CaseRow] = []
    for case, (log, wanted) in found.items():
        made, tokens, trained = ours(log)
        rows.append(CaseRow(case=case, by="OpenGyre", rows=made, tokens=tokens, trained=trained, wanted=wanted))
        for name, answer in answers.items():
            rows.append(CaseRow(case=case, by=name, wanted=wanted, **answer[case]))
    return rows


def _ask(name: str, python: Path, found: dict[str, tuple[Log, int]]) -> dict[str, dict[str, int]]:
    logs = {
        case: [{"messages": messages, "sampled": sampled} for messages, sampled in log]
        for case, (log, _) in found.items()
    }
    script = Path(__file__).with_name("bench_trajectory_others.py")
    done = subprocess.run(
        [str(python), str(script), name],
        input=json.dumps(logs),
        capture_output=True,
        check=True,
        text=True,
        timeout=300,
    )
    return json.loads(done.stdout.splitlines()[-1])
