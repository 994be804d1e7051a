"""Real logs: the figures that their collection states come out exactly."""

from opengyre.formats import Forest, TreeReport, read_tree
from support.trajectory_logs import real, source


def report(name: str) -> TreeReport:
    return read_tree(source(real(name)), Forest(), per_call=True)


def test_a_template_that_empties_the_thought_leaves_the_completion_one_token_in() -> None:
    found = report("nemo_gym/vllm_round_trip_qwen3_think_strip.json")
    assert (found.format, found.unit) == ("nemo-gym", "tokens")
    assert (found.events, found.path_tokens, found.unique_nodes, found.leaves) == (702, 7427, 4338, 2)
    assert found.refused.count == 0
    assert found.transitions == {"realign": 1}
    assert found.diagnoses == {"template": 1}
    assert found.per_call[1].offset == 3088 + 1


def test_independent_samples_share_tokens_but_no_events() -> None:
    found = report("nemo_gym/coding_group5_token_level.jsonl")
    assert (found.path_tokens, found.unique_nodes, found.events) == (5568, 5017, 5023)
    assert (found.executions, found.leaves, found.refused.count) == (5, 5, 0)


def test_calls_with_empty_ids_are_refused() -> None:
    found = report("nemo_gym/anyterminal_hermes_91calls_empty_tokens.jsonl")
    assert found.refused.count == 147
    assert found.refused.reasons == {"empty_completion": 147}
    assert (found.events, found.unique_nodes, found.leaves) == (0, 0, 0)


def test_elided_tool_output_diverges() -> None:
    found = report("swe_agent/marshmallow-1867_last5obs_elided.traj")
    kinds = [row.transition for row in found.per_call[1:]]
    assert len(kinds) == 12
    assert kinds[:4] == ["extend"] * 4
    assert "extend" not in kinds[4:]
    assert {row.diagnosis for row in found.per_call[5:]} == {"edit"}


def test_a_session_with_two_false_forks_is_one_branch() -> None:
    found = report("claude_code/drmaciver_python-to-rust-port.jsonl")
    assert (found.format, found.calls, found.leaves) == ("claude-code", 39, 1)
    assert found.transitions == {"extend": 38}
    assert found.facts["cache_continuity"] == {"of": 38, "holds": 38}


def test_a_rewind_and_a_compaction_leave_three_leaves() -> None:
    found = report("claude_code/ccl_dag_compact_after_rewind.jsonl")
    assert found.leaves == 3
    assert found.leaf_kinds == {"abandoned": 1, "compacted": 1, "final": 1}
    assert found.transitions["compaction"] == 1


def test_a_compaction_begins_a_history_anew() -> None:
    found = report("claude_code/scout_compaction_session.jsonl")
    assert (found.leaves, found.transitions) == (2, {"compaction": 1})


def test_copied_steps_are_trained_once_and_absent_files_warn() -> None:
    found = report("atif/terminus_2_hello-world-context-summarization-linear-history.trajectory.json")
    assert (found.format, found.calls, found.ignored) == ("atif", 7, {"copied_step": 1})
    assert len(found.warnings) == 3
    assert all("is not beside the file" in warning for warning in found.warnings)
    assert found.transitions == {"compaction": 1, "extend": 5}


def test_inspect_events() -> None:
    reroll = report("inspect_ai/scout_events_auto_spans_with_reroll.json")
    assert (reroll.format, reroll.calls, reroll.leaves, reroll.refused.count) == ("inspect", 3, 3, 0)
    agents = report("inspect_ai/scout_events_interleaved_agents.json")
    assert agents.agents == {"first_agent": 1, "main": 2, "second_agent": 1}
    assert agents.refused.reasons == {"no_prompt": 4}
    parallel = report("inspect_ai/scout_events_parallel_tool_calls.json")
    assert (parallel.calls, parallel.ignored) == (2, {"tool": 3})
