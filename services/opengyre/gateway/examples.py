"""Examples of requests and answers, for the OpenAPI page. They are real: a test checks them against their types."""

from typing import Any

TASK_IN: dict[str, Any] = {
    "task": "write-000001",
    "instruction": "write hello into greeting.txt",
    "files": {"notes/readme.txt": "nothing here\n"},
    "checks": [
        {"name": "exists", "command": "[ -f greeting.txt ]", "weight": 0.25},
        {"name": "exact", "command": '[ "$(cat greeting.txt)" = hello ]', "weight": 0.75},
    ],
    "max_turns": 4,
    "purpose": "train",
    "repeat": 2,
    "family": "write",
    "labels": {"split": "train"},
}
TASK_BATCH: dict[str, Any] = {"run": "demo", "tasks": [TASK_IN]}
RUN_IN: dict[str, Any] = {
    "run": "demo",
    "model": "/srv/gyre/models/warmstart",
    "updates": 64,
    "seed": 1,
    "dispatch": {"phi": 0.5, "mu": 2, "batch_groups": 8, "group_size": 8},
    "harness": {"max_turns": 4, "max_tokens": 48},
    "elastic": {"policy": "fine"},
}
RUN_STOP: dict[str, Any] = {"state": "stopped"}
RUN_CHANGE: dict[str, Any] = {"dispatch": {"phi": 1, "mu": 1}, "elastic": {"min_rollout_cells": 1}}
SPEC: dict[str, Any] = {
    "run": "demo",
    "model": "/srv/gyre/models/warmstart",
    "updates": 64,
    "seed": 1,
    "dispatch": {"phi": 0.5, "mu": 2, "batch_groups": 8, "group_size": 8, "min_members": 2},
    "harness": {
        "agent": "shell", "system": None, "max_turns": 4, "time_budget_s": 600.0, "command_timeout_s": 10.0,
        "max_tokens": 48, "context_tokens": 512, "temperature": 1.0, "observation_chars": 40,
    },
    "optimization": {
        "loss": "clip", "average": "execution", "advantage": "grpo", "clip_low": 0.8, "clip_high": 1.28,
        "optimizer": "adamw", "learning_rate": 0.0002, "weight_decay": 0.0, "gradient_clip_norm": 1.0,
    },
    "elastic": {"policy": "fine", "train_cells": 1, "min_rollout_cells": 0, "dwell_s": 0.5},
    "serving": {"dtype": "bfloat16", "kv_dtype": None, "chunked_prefill": True},
    "state": "active",
}  # fmt: skip
RUN_REPORT: dict[str, Any] = {
    "spec": SPEC,
    "progress": {
        "update": 12,
        "version": 12,
        "published_version": 12,
        "score": 0.71,
        "logprob_gap": 0.00001,
        "alarm": None,
    },
}
RUN_STOPPED: dict[str, Any] = {**RUN_REPORT, "spec": {**SPEC, "state": "stopped"}}
RUN_LIST: dict[str, Any] = {"runs": [SPEC], "next": None}
UPDATE: dict[str, Any] = {
    "update": 12, "version": 12, "published": True, "score": 0.71, "groups": 8, "executions": 64,
    "staleness_mean": 1.0, "staleness_max": 2, "tokens": 5120, "loss": -0.012, "kl": 0.004, "entropy": 0.61,
    "clip_fraction": 0.03, "gradient_norm": 0.42, "learning_rate": 0.0002, "logprob_gap": 0.00001,
    "logprob_gap_max": 0.0002, "logprob_gap_by_version": {"10": 0.012, "11": 0.00001}, "reference_kl": 0.0,
    "effective_share": 0.98, "masked_tokens": 0, "unique_tokens": 9100, "path_tokens": 21400,
    "token_versions": {"10": 1900, "11": 3220}, "skipped": None, "alarm": None, "seconds": 1.9, "sequence": 97,
}  # fmt: skip
UPDATE_LIST: dict[str, Any] = {"run": "demo", "updates": [UPDATE], "next": None}
ACCEPTED: dict[str, Any] = {
    "run": "demo",
    "tasks": [{"run": "demo", "task": "write-000001", "sequence": 17}],
    "pending": 5,
}
TASK_SUMMARY: dict[str, Any] = {
    "run": "demo", "task": "write-000001", "sequence": 17, "state": "live", "purpose": "train", "family": "write",
    "repeat": 2, "groups": {"trained": 1, "live": 1}, "mean_score": 0.625,
}  # fmt: skip
TASK_LIST: dict[str, Any] = {"run": "demo", "tasks": [TASK_SUMMARY], "next": 17}
GROUP: dict[str, Any] = {
    "group": "demo-g000003", "state": "trained", "executions": ["demo-g000003-e00", "demo-g000003-e01"],
    "admitted_version": 2, "consumed_version": 3, "scores": {"demo-g000003-e00": 1.0, "demo-g000003-e01": 0.25},
    "unscored": {}, "reason": None,
}  # fmt: skip
TASK_REPORT: dict[str, Any] = {"summary": TASK_SUMMARY, "spec": TASK_IN, "groups": [GROUP]}
GROUP_REPORT: dict[str, Any] = {
    "entry": {
        "run": "demo", "group": "demo-g000003", "task": "write-000001", "sequence": 3, "purpose": "train",
        "state": "trained", "executions": ["demo-g000003-e00", "demo-g000003-e01"], "admitted_version": 2,
        "dispatched": True, "consumed_version": 3, "reason": None, "unscored": {},
    },
    "staleness": 1,
    "members": [
        {
            "execution": "demo-g000003-e00", "state": "ended", "events": {"started": 1, "call": 2, "ended": 1},
            "end_reason": "done", "turns": 2, "score": 1.0, "unscored": None,
        }
    ],
}  # fmt: skip
EXECUTION_REPORT: dict[str, Any] = {
    "execution": "demo-g000003-e00",
    "group": "demo-g000003",
    "run": "demo",
    "state": "ended",
    "end_reason": "done",
    "turns": 2,
    "score": 1.0,
    "unscored": None,
    "parts": [{"name": "exists", "weight": 0.25, "value": 1.0, "output": ""}],
    "verified_score": 1.0,
    "lanes": [],
    "log": [
        {
            "sequence": 412,
            "time": 1790000000.5,
            "event": {
                "type": "traj.tool.v1", "run": "demo", "group": "demo-g000003", "execution": "demo-g000003-e00",
                "index": 3, "attempt": 0, "turn": 0, "exec_id": "demo-g000003-e00-t0",
                "command": "echo hello > greeting.txt", "exit_code": 0, "output": "", "output_bytes": 0,
                "timed_out": False, "duration_s": 0.02,
            },
        }
    ],
    "next": None,
}  # fmt: skip
TREE_REPORT: dict[str, Any] = {
    "tree": {
        "execution": "demo-g000003-e00", "group": "demo-g000003", "run": "demo", "task": "write-000001",
        "purpose": "train", "state": "ended", "end_reason": "done", "group_state": "ready", "group_reason": None,
        "score": 1.0, "unscored": None, "advantage": 0.9, "baseline": 0.625, "scale": 2.4, "late": False, "calls": 2,
        "events": 31, "path_tokens": 120, "unique_nodes": 78, "leaves": 1, "dedup_ratio": 1.5385, "trained_tokens": 31,
        "masked_tokens": 0, "left_out": {}, "refused": {}, "transitions": {"extend": 1}, "diagnoses": {}, "j_max": None,
        "paths": [
            {"role": "main", "calls": ["c0", "c1"], "tokens": 78, "trained_tokens": 31, "masked_tokens": 0},
        ],
        "per_call": [
            {
                "call": "c0", "turn": 0, "role": "main", "transition": "root", "related": None, "offset": 0,
                "diagnosis": None, "prompt_tokens": 28, "sampled_tokens": 14, "outcome": "trained", "reason": None,
                "path": 0, "weight": 1.0, "version_min": 2, "version_max": 2, "text": "echo hello > greeting.txt",
                "potential": 0.25, "advantage": 1.2, "lane": None,
            }
        ],
        "credit": "progress",
        "progress": [{"turn": 0, "call": None, "potential": 0.25, "infra_error": None}],
        "forked_at": None, "lanes": [],
    },
    "trained_version": 3, "staleness": 1, "dropped": None,
}  # fmt: skip
BOOK: dict[str, Any] = {"dispatched": 40, "trained": 24, "dropped": {}, "ready": 6, "live": 10, "balances": True}
STALENESS: dict[str, Any] = {
    "run": "demo", "phi": 0.5, "mu": 2, "predicted": 1.0, "mean": 1.04, "maximum": 2,
    "distribution": {"0": 6, "1": 11, "2": 7}, "window_mean": 1.1, "window": 64, "published_version": 12,
    "trainer_version": 12, "groups": BOOK, "executions": {**BOOK, "dispatched": 320, "trained": 192, "ready": 48,
    "live": 80}, "evaluated_groups": 0, "by_execution_mean": 1.1, "by_execution_maximum": 4,
    "by_execution": {"0": 44, "1": 92, "2": 50, "4": 6}, "by_execution_window_mean": 1.2, "by_token_mean": 0.9,
    "trained_mean_tokens": 61.5, "discards": {"infra": {"executions": 1, "mean_tokens": 12.0}},
    "admission": {
        "dispatch": SPEC["dispatch"], "updates": 64, "state": "active", "finished": False, "published": 12,
        "kept_executions": 928, "unconsumed_executions": 160, "live_groups": 10, "oldest_version": 10, "waiting": 5,
        "most": 64, "evaluating": 0,
    },
    "live_executions": 80,
}  # fmt: skip
HOST: dict[str, Any] = {
    "host": "host0", "cell": "host0", "boot": "b41f", "state": "rollout", "epoch": 7, "url": "http://127.0.0.1:40123",
    "engine": "tiny", "run": "demo", "version": 12, "capacity": 32, "running": 5, "tokens_per_s": 910.0,
    "memory_bytes": 3145728, "training_group": None, "training_update": None, "since_s": 3.2, "last_switch_s": 0.11,
}  # fmt: skip
CELL: dict[str, Any] = {"cell": "host0", "hosts": ["host0"], "state": "rollout", "role": "rollout", "wish": None}
HOSTS: dict[str, Any] = {"hosts": [HOST], "cells": [CELL], "cells_missing": None}
CELLS: dict[str, Any] = {"cells": [CELL]}
DECISION: dict[str, Any] = {
    "type": "decision.v1", "run": "demo", "decision": "5-12", "kind": "wish", "input": None, "admission": None,
    "wish": "drain", "changes": [{"cell": "host1", "role": "train", "reason": "an operator's wish: drain"}],
    "admitted": [], "version": None, "unconsumed": None, "note": "an operator's wish: drain", "suspends": False,
}  # fmt: skip
DECISION_LIST: dict[str, Any] = {
    "run": "demo",
    "decisions": [{"sequence": 40, "time": 1790000000.5, "decision": DECISION}],
    "next": None,
}
WISH: dict[str, Any] = {"cell": "host0", "wish": "drain", "state": "rollout"}
WEIGHTS: dict[str, Any] = {
    "run": "demo",
    "published_version": 12,
    "versions": [
        {
            "version": 12, "parent": 10, "step": 12, "directory": ".gyre/weights/demo/v000012", "bytes": 2097152,
            "applied": [{"host": "host0", "boot": "b41f", "duration_s": 0.03}], "refused": [], "sequence": 31,
        }
    ],
    "next": None,
}  # fmt: skip
WAIT: dict[str, Any] = {
    "service": "rollout", "replica": "node-17-a1b2c3", "what": "a host in the rollout role", "since_s": 1.4,
    "bound_s": None, "count": 12,
}  # fmt: skip
STATUS: dict[str, Any] = {
    "ready": True,
    "missing": [],
    "not_ready": [],
    "waits": [WAIT],
    "run": RUN_REPORT,
    "runs": {"demo": "active"},
    "pending_tasks": 5,
    "staleness": STALENESS,
    "staleness_missing": None,
    "held": ["elastic.min_rollout_cells is 2, and 1 cell can be in that role (host1 is lost)"],
    "gauges": {"rollout.live_episodes": 12.0},
    "dead_letters": {
        "count": 1,
        "last": [
            {
                "sequence": 1, "origin_stream": "EPISODES", "consumer": "rollout",
                "origin_subject": "gyre.v1.episode.demo.dispatch", "deliveries": 1, "error": "undecodable: ...",
            }
        ],
    },
    "services": [
        {
            "service": "rollout", "replica": "node-17-a1b2c3", "pid": 4711, "url": "http://127.0.0.1:40991",
            "ready": True, "missing": None, "waits": [], "gauges": {"live_episodes": 12.0},
        }
    ],
}  # fmt: skip
EVENT = """\
id: TASKS:17,UPDATES:97
event: task.submitted.v1
data: {"stream":"TASKS","sequence":17,"subject":"gyre.v1.task.demo.write-000001.submitted","time":1790000000.5,\
"event":{"type":"task.submitted.v1","run":"demo","task":"write-000001"}}

"""
