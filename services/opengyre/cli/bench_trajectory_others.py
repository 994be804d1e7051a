"""What other aggregators make of the same calls. Run by a Python that has them, never by ours; it imports neither us
nor each other's: `PYTHON bench_trajectory_others.py agentlightning|verifiers < logs.json`.

A log is a list of calls; a call is its prompt as messages (role, token ids) and the ids that were sampled. What comes
back for each: rows, tokens over all rows, and tokens with a loss, counted where they are.
"""

import json
import os
import sys
import types
from typing import Any

Log = list[dict[str, Any]]


def _prompt(call: dict[str, Any]) -> list[int]:
    return [token for _, tokens in call["messages"] for token in tokens]


def agentlightning(log: Log) -> dict[str, int]:
    """Its trajectory level (`AgentModeDaemon.get_train_data_batch`); verl's container is replaced by a plain one."""

    class DataProto:
        def __init__(self, **fields: Any) -> None:
            self.__dict__.update(fields)
            self.non_tensor_batch: dict[str, Any] = {}

    sys.modules.setdefault("verl", types.SimpleNamespace(DataProto=DataProto))  # type: ignore[arg-type]  # only in the other system's own environment
    import agentlightning  # type: ignore[import-not-found]  # only in the other system's own environment

    # The package beside the module needs datasets and all of verl; the module does not.
    beside = types.ModuleType("agentlightning.verl")
    beside.__path__ = [f"{agentlightning.__path__[0]}/verl"]
    sys.modules["agentlightning.verl"] = beside
    from agentlightning.verl import daemon  # type: ignore[import-not-found]  # only in the other system's own environment

    longest = max(len(_prompt(call)) + len(call["sampled"]) for call in log)
    made = daemon.AgentModeDaemon.__new__(daemon.AgentModeDaemon)
    triplets = [
        types.SimpleNamespace(prompt={"token_ids": _prompt(call)}, response={"token_ids": call["sampled"]}, reward=None)
        for call in log
    ]
    made.__dict__.update(
        mode="v1", pad_token_id=0, tokenizer=None, reward_fillna_value=0.0, _use_mrope=False,
        trace_aggregator={"level": "trajectory"}, train_rollout_n=1, _total_tasks_queued=1,
        _completed_rollouts_v0={"r": types.SimpleNamespace(rollout_id="r", triplets=triplets, final_reward=1.0)},
        _task_id_to_original_sample={"r": {"data_id": "d"}},
    )  # fmt: skip
    made.is_train = True
    batch, _ = made.get_train_data_batch(longest, longest, "cpu", 0)
    tensors = batch.batch
    return {
        "rows": int(tensors["attention_mask"].shape[0]),
        "tokens": int(tensors["attention_mask"].sum()),
        "trained": int(tensors["response_mask"].sum()),
    }


def verifiers(log: Log) -> dict[str, int]:
    """Its message graph: `prepare_turn`, `commit`, and a row for each leaf."""
    from verifiers.v1 import graph  # type: ignore[import-not-found]  # only in the other system's own environment
    from verifiers.v1.types import (  # type: ignore[import-not-found]  # only in the other system's own environment
        AssistantMessage,
        Response,
        SystemMessage,
        TurnTokens,
        UserMessage,
    )  # fmt: skip

    kinds = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage}
    trace = types.SimpleNamespace(
        nodes=[], _head_index={}, mm_token_type_id_map={}, calls=[], clear_preview=lambda _: None
    )
    for number, call in enumerate(log):
        spans, place = [], 0
        for _, tokens in call["messages"]:
            spans.append((place, place + len(tokens)))
            place += len(tokens)
        prompt = [kinds[role](content=" ".join(map(str, tokens))) for role, tokens in call["messages"]]
        turn = graph.prepare_turn(trace, prompt)
        turn.commit(
            Response(
                id=f"c{number}", created=0, model="m", finish_reason="stop",
                message=AssistantMessage(content=" ".join(map(str, call["sampled"]))),
                tokens=TurnTokens(
                    prompt_ids=_prompt(call), completion_ids=call["sampled"], message_spans=spans,
                    completion_logprobs=[-0.5] * len(call["sampled"]),
                ),
            )
        )  # fmt: skip
    rows = []
    for leaf in graph.leaves(trace):
        path, node = [], leaf
        while node is not None:
            path.append(trace.nodes[node])
            node = trace.nodes[node].parent
        rows.append(path)
    return {
        "rows": len(rows),
        "tokens": sum(len(node.token_ids) for path in rows for node in path),
        "trained": sum(sum(node.mask) for path in rows for node in path),
    }


if __name__ == "__main__":
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the network else
    aggregate = {"agentlightning": agentlightning, "verifiers": verifiers}[sys.argv[1]]
    print(json.dumps({name: aggregate(log) for name, log in json.load(sys.stdin).items()}))
