"""How vLLM is started and read, without vLLM: plans that cannot work are refused, streams become results."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.host.vllm_arguments import OWN, fault_of
from opengyre.host.vllm_calls import Sampling, body_of
from opengyre.host.vllm_machine import each_host, gpus_by_host, gpus_fault, gpus_of, visible_gpus
from opengyre.host.vllm_plan import Facts, kv_fault, plan, same_shape
from opengyre.host.vllm_process import cause
from opengyre.shared.settings import HostSettings
from opengyre.shared.vllm import VllmMissingError, interpreter
from opengyre.tiny.config import ModelDirectoryError
from opengyre.tiny.types import EngineError, GenerateRequest, InvalidRequestError, VersionSpan

GIB = 1 << 30
FACTS = Facts("/m", 1000, 4096, 100 << 20, 2 * 4 * 2 * 32, 8, "float32")


def settings(**changes: Any) -> HostSettings:
    return HostSettings(engine="vllm", **changes)


def test_a_plan_serves_tokens_and_says_in_what() -> None:
    found = plan(
        FACTS,
        settings(vllm_context=1024, capacity=8, vllm_arguments=("--no-enforce-eager",)),
        gpus=0,
        free_bytes=8 * GIB,
    )
    joined = " ".join(found.arguments)
    for part in ("--dtype float32", "--max-model-len 1024", "--max-num-seqs 8", "--logprobs-mode processed_logprobs"):
        assert part in joined
    assert found.arguments[-1] == "--no-enforce-eager", "what a person says goes before ours"
    assert "--enforce-eager" in found.arguments, "compiling a model takes minutes at its first start"
    assert found.environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert found.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    gpu = plan(FACTS, settings(vllm_dtype="bfloat16", vllm_tensor_parallel=2), gpus=2, free_bytes=8 * GIB)
    assert "--enable-sleep-mode" in gpu.arguments
    assert "--enforce-eager" not in gpu.arguments
    assert gpu.weight_bytes == 50 << 20
    assert "VLLM_CPU_KVCACHE_SPACE" not in gpu.environment


@pytest.mark.parametrize(
    ("arguments", "gpus", "compiles"),
    [((), 0, False), (("--no-enforce-eager",), 0, True), (("--no_enforce_eager",), 0, True), ((), 1, True)],
)
def test_nothing_is_compiled_on_a_cpu_unless_a_person_says_so(
    arguments: tuple[str, ...], gpus: int, compiles: bool
) -> None:
    found = plan(FACTS, settings(vllm_arguments=arguments), gpus=gpus, free_bytes=8 * GIB)
    assert ("TORCHDYNAMO_DISABLE" not in found.environment) is compiles


@pytest.mark.parametrize(
    ("changes", "gpus", "free", "said"),
    [
        ({"vllm_context": 8192}, 0, 8 * GIB, "vllm_context is 8192; the model in /m has 4096 positions"),
        ({"vllm_tensor_parallel": 3}, 0, 8 * GIB, "vllm_tensor_parallel is 3; .* allowed are 1, 2, 4, 8"),
        ({"vllm_tensor_parallel": 4}, 2, 8 * GIB, "this machine has 2 GPUs"),
        ({"vllm_kv_gb": 9}, 0, 8 * GIB, "vllm_kv_gb is 9: beside 100 MiB of weights and 1024 .* leave 6 GiB"),
        ({}, 0, 1 << 30, "1024 MiB of memory are too few; 2148 would do"),
        ({"vllm_memory_fraction": 0.1}, 1, 1010 << 20, "memory for keys and values of 512 tokens"),
    ],
)
def test_what_cannot_work_is_refused_with_the_number_that_would(
    changes: dict[str, Any], gpus: int, free: int, said: str
) -> None:
    with pytest.raises(ModelDirectoryError, match=said):
        plan(FACTS, settings(**changes), gpus=gpus, free_bytes=free)


def test_a_canary_may_be_off_by_what_the_numbers_format_does() -> None:
    def bound(**changes: Any) -> float:
        return plan(FACTS, settings(**changes), gpus=0, free_bytes=8 * GIB).canary_nats

    assert bound() == 1e-3
    assert bound(vllm_dtype="bfloat16") == 0.25
    assert bound(vllm_dtype="bfloat16", vllm_canary_nats=0.5) == 0.5


def test_a_later_version_of_a_model_has_its_shape() -> None:
    assert same_shape(FACTS, replace(FACTS, directory="/other", weight_bytes=1))
    assert not same_shape(FACTS, replace(FACTS, vocabulary=1001))


def test_weights_that_cannot_be_served_as_they_are_are_named() -> None:
    odd = Facts("/m", 1000, 4096, 1, 16, 8, "float64")
    with pytest.raises(ModelDirectoryError, match=r"host\.vllm_dtype says in what they are served: float32, bfloat16"):
        plan(odd, settings(), gpus=0, free_bytes=8 * GIB)
    assert plan(odd, settings(vllm_dtype="float32"), gpus=0, free_bytes=8 * GIB).weight_bytes == 1


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(VllmMissingError, match=r"host.vllm_python is .*absent; allowed is the python"):
        interpreter(str(tmp_path / "absent"))


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("0", 1), ("0,3", 2)])
def test_gpus_are_those_that_the_process_may_use(visible: str, count: int) -> None:
    assert gpus_of({"CUDA_VISIBLE_DEVICES": visible}) == count


def test_hosts_of_a_machine_have_gpus_of_their_own() -> None:
    """Each host of `gyre up` started its engine on the first GPU."""
    named = visible_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-5c1e,GPU-77,1"})
    assert gpus_by_host(named, 2, each_host(settings(vllm_tensor_parallel=2))) == ["3,GPU-5c1e", "GPU-77,1"]
    assert gpus_by_host(named, 3, each_host(settings())) == ["3", "GPU-5c1e", "GPU-77"]
    assert each_host(settings(vllm_tensor_parallel=2, ranks=4)) == 4


@pytest.mark.parametrize(
    ("changes", "gpus", "hosts", "said"),
    [
        ({}, 4, 4, None),
        ({"vllm_tensor_parallel": 2}, 4, 2, None),
        ({}, 1, 2, "--hosts is 2, each with a GPU of its own; this machine has 1 GPU, so allowed are up to 1"),
        (
            {"vllm_tensor_parallel": 4},
            8,
            3,
            (
                "--hosts is 3, each with 4 GPUs of its own; this machine has 8 GPUs, so allowed are up to 2, "
                "or host.vllm_tensor_parallel up to 2"
            ),
        ),
        (
            {"vllm_tensor_parallel": 3, "ranks": 4},
            8,
            3,
            (
                "--hosts is 3, each with 4 GPUs of its own; this machine has 8 GPUs, so allowed are up to 2, "
                "or host.vllm_tensor_parallel and host.ranks up to 2"
            ),
        ),
        (
            {"ranks": 2},
            2,
            3,
            "--hosts is 3, each with 2 GPUs of its own; this machine has 2 GPUs, so allowed are up to 1",
        ),
        ({"ranks": 4}, 2, 1, "host.ranks is 4; this machine has 2 GPUs, so allowed are up to 2"),
    ],
)
def test_hosts_that_have_too_few_gpus_are_told_how_many_would_do(
    changes: dict[str, Any], gpus: int, hosts: int, said: str | None
) -> None:
    assert gpus_fault(settings(**changes), gpus, hosts) == said


@pytest.mark.parametrize(
    ("dests", "said"),
    [
        ((), None),
        (("enforce_eager", "kv_cache_dtype"), None),
        (
            ("max_model_len", "seed"),
            "host.vllm_arguments has --max-model-len, which a host takes from host.vllm_context; set that instead",
        ),
        (
            ("model_tag",),
            "host.vllm_arguments has the name of a model; a host serves the run's policy, so leave it out",
        ),
        (
            ("port",),
            "host.vllm_arguments has --port, with which a host could not speak to its server; leave it out",
        ),
    ],
)
def test_arguments_that_are_a_host_s_own_are_refused_with_what_to_set(dests: tuple[str, ...], said: str | None) -> None:
    """`--max-model-len 40` went before host.vllm_context, and calls failed for ever."""
    assert fault_of(dests) == said


def test_what_a_host_takes_from_a_setting_names_one() -> None:
    named = {by.removeprefix("host.") for by in OWN.values() if by is not None and by.startswith("host.")}
    assert named <= HostSettings.model_fields.keys()


REQUEST = GenerateRequest("r", (1, 2, 3), 50, stop_token_ids=(9,), seed=4)


def chunk(*tokens: int, finish: str | None = None, versions: list[tuple[int, int, int]] | None = None) -> bytes:
    spans = None if versions is None else [{"version": str(v), "start": s, "end": e} for v, s, e in versions]
    choice = {
        "token_ids": tokens,
        "logprobs": {"content": [{"logprob": -0.5, "rank": 1} for _ in tokens]},
        "finish_reason": finish,
        "weight_versions": spans,
    }
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n"


def test_a_call_asks_for_no_more_than_the_context_holds() -> None:
    params = body_of(REQUEST, 10, 3, 8)["sampling_params"]
    assert (params["max_tokens"], params["stop_token_ids"], params["stream_interval"]) == (7, [9], 8)
    assert body_of(REQUEST, 10, 3, 8)["cache_salt"] == "v3"
    assert body_of(replace(REQUEST, priority=-1), 10, 3, 8)["priority"] == -1


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5), st.booleans()), max_size=12))
def test_spans_say_which_weights_sampled_each_token(steps: list[tuple[int, int, bool]]) -> None:
    """Law: at any time the spans are disjoint, in order, and give every token that came the version under which the
    server sampled it, also where it came after a change; an increment is a cut of them."""
    call = Sampling(REQUEST, 0)
    sampled: list[int] = []
    for come, more, changes in steps:
        new = max(0, len(call.tokens) + come + more - len(sampled))
        sampled += [call.version] * new
        call.take(chunk(*range(come)))
        if changes:
            call.changed(call.version + 1, len(sampled))
        covered = call.covered()
        assert [place for span in covered for place in range(span.start, span.end)] == list(range(len(call.tokens)))
        assert [span.version for span in covered for _ in range(span.start, span.end)] == sampled[: len(call.tokens)]
        half = len(call.tokens) // 2
        increment = call.increment(half)
        assert sum(span.end - span.start for span in increment.weight_versions) == len(increment.token_ids)


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5), st.booleans())
def test_what_was_not_proven_is_never_seen(before: int, meanwhile: int, after: int, ends: bool) -> None:
    call = Sampling(REQUEST, 0)
    call.take(chunk(*range(before)))
    call.hold()
    call.changed(1, before)
    call.take(chunk(*range(meanwhile), finish="stop" if ends else None))
    assert len(call.increment(0).token_ids) == before
    call.withdraw()
    assert call.take(chunk(*range(after), finish="stop", versions=[(1, 0, after)])) == 0
    result = call.result()
    assert (result.token_ids, result.finish_reason) == (tuple(range(before)), "abort")
    assert len(result.logprobs) == before
    assert result.weight_versions == ((VersionSpan(0, 0, before),) if before else ())


def test_what_was_proven_is_seen_with_its_version() -> None:
    call = Sampling(REQUEST, 0)
    call.take(chunk(1, 2))
    call.hold()
    call.changed(1, 2)
    call.take(chunk(3))
    call.proven()
    call.changed(1, 3)
    call.take(chunk(4))
    assert call.increment(0).token_ids == (1, 2, 3, 4)
    assert call.increment(0).weight_versions == (VersionSpan(0, 0, 2), VersionSpan(1, 2, 4))


def test_what_the_engine_says_of_versions_is_taken_in_the_end() -> None:
    call = Sampling(REQUEST, 0)
    assert call.take(chunk(1, 2)) == 2
    call.changed(1, 3)
    call.take(chunk(3, 4))
    assert call.result().weight_versions == (VersionSpan(0, 0, 3), VersionSpan(1, 3, 4))
    assert call.result().finish_reason == "abort", "it has not ended by itself"
    call.take(chunk(9, finish="stop", versions=[(0, 0, 3), (1, 3, 5)]))
    result = call.result()
    assert (result.finish_reason, result.token_ids) == ("stop", (1, 2, 3, 4, 9))
    assert result.weight_versions == (VersionSpan(0, 0, 3), VersionSpan(1, 3, 5))
    assert call.take(b"data: [DONE]\n") == call.take(b"\n") == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'data: {"error": {"message": "EngineCore encountered an issue"}}\n', "EngineCore"),
        (b"data: {half\n", "cannot be read"),
        (chunk(1, finish="error"), "ended a call by 'error'"),
        (b'data: {"choices": [{"token_ids": [1, 2]}]}\n', "0 log-probs for 2 tokens"),
        (
            chunk(1, finish="stop", versions=[]).replace(b"[]", b'[{"version": "default", "start": 0, "end": 1}]'),
            "default",
        ),
    ],
)
def test_answers_that_are_none_are_failures(line: bytes, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        Sampling(REQUEST, 0).take(line)


def test_a_call_that_vllm_refuses_is_refused_and_not_a_failure() -> None:
    """vLLM answers 200 and says it in the stream: the call was tried anew at each host, each second."""
    line = b'data: {"error": {"message": "The decoder prompt is too long", "type": "BadRequestError", "code": 400}}\n'
    with pytest.raises(InvalidRequestError, match="too long"):
        Sampling(REQUEST, 0).take(line)


def test_memory_that_does_not_hold_the_keys_and_values_is_said_before_there_is_a_model() -> None:
    asked = HostSettings(vllm_kv_gb=4)
    assert kv_fault(asked, 5 << 30) is None
    assert kv_fault(asked, (5 << 30) - 1) == (
        "host.vllm_kv_gb is 4: beside 1024 MiB of the engine's own, 5119 MiB of memory leave 3 GiB"
    )


def test_memory_is_for_all_hosts_of_the_machine() -> None:
    asked = HostSettings(vllm_kv_gb=15)
    assert kv_fault(asked, 32 << 30, 2) is None
    assert kv_fault(asked, 20 << 30, 1) is None
    assert kv_fault(asked, 20 << 30, 2) == (
        "host.vllm_kv_gb is 15: beside 1024 MiB of each of 2 hosts' own, 20480 MiB of memory leave 9 GiB to each"
    )


ROOT = (
    "(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["starts", "is ready"], None),
        ([], None),
        ([ROOT], None),
        (["ValueError: one", "KeyError: 'two'", "    at a line"], "KeyError: 'two'"),
        (
            [
                "(EngineCore pid=9) ERROR 11-30 12:00:00 [core.py:842]     raise ValueError(text)",
                "(EngineCore pid=9) ERROR 11-30 12:00:00 [core.py:842] ValueError: shapes (50000) and (49152) differ",
                "(APIServer pid=7) Traceback (most recent call last):",
                *["(APIServer pid=7)   File ..., in run"] * 30,
                ROOT,
            ],
            "ValueError: shapes (50000) and (49152) differ",
        ),
        (["Traceback", "torch.cuda.OutOfMemoryError: no memory", ROOT], "torch.cuda.OutOfMemoryError: no memory"),
        (
            [
                "ValidationError: 1 validation error for ModelConfig",
                "  Value error, the context is too long",
                "    For further information visit a page",
            ],
            "ValidationError: 1 validation error for ModelConfig Value error, the context is too long",
        ),
        (
            [
                "usage: vllm [-h] [--headless]",
                "            [--config CONFIG]",
                "vllm: error: unrecognized arguments: --no",
            ],
            "vllm: error: unrecognized arguments: --no",
        ),
        (
            [
                "(APIServer pid=7) WARNING 11-30 12:00:00 [serving.py:84] ValueError: Tokenizer not available",
                "INFO 11-30 12:00:00 [launcher.py:3] OSError: [Errno 24] Too many open files; consider `ulimit -n`",
            ],
            None,
        ),
    ],
)
def test_the_cause_of_an_end_is_the_last_error_that_names_itself(lines: list[str], found: str | None) -> None:
    assert cause(lines) == found
