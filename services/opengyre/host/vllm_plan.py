"""How vLLM is started for a model: what it needs, whether that is there, its arguments. Pure, but for reading a config.

Nothing is started that cannot work: the sentence of a refusal has the number that would.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from opengyre.policy.directory import read_config, weight_files
from opengyre.shared.settings import HostSettings
from opengyre.tiny.config import ModelDirectoryError

BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
CANARY_NATS: Final = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.1}
"""By how much log-probs of an engine that computes in it may be off from the trainer's float32, on average.

A forward of SmolLM2-135M in bfloat16 is off by 0.077 nats on its canary (of -15 a token), in float16 by 0.018; vLLM in
float32 by less than 1e-4, of which the rounding in the file is most."""
COMPILES: Final = "--no-enforce-eager"
"""Among `host.vllm_arguments`: a person has vLLM compile on a CPU as well."""
OVERHEAD_BYTES: Final = 1 << 30
"""What the engine's own processes take beside weights and keys/values on a CPU (1.1 GiB was measured with 0.32.0)."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Of a model directory."""

    directory: str
    vocabulary: int
    context: int
    """Positions that the model has."""
    weight_bytes: int
    """As they lie in the files."""
    kv_values: int
    """Numbers that one token's keys and values are, all layers together."""
    heads: int
    dtype: str
    """Of the files, as the config names it."""


def facts_of(directory: Path) -> Facts:
    """Raises `ModelDirectoryError` naming what is missing."""
    fields = read_config(directory)
    text = fields.get("text_config") or fields

    def number(name: str, default: int | None = None) -> int:
        value = text.get(name, default)
        if not isinstance(value, int) or value < 1:
            raise ModelDirectoryError(f"{directory / 'config.json'}: {name} is {value!r}; allowed are numbers from 1")
        return value

    heads = number("num_attention_heads")
    width = text.get("head_dim") or number("hidden_size") // heads
    layers = _attention_layers(text, number("num_hidden_layers"))
    return Facts(
        directory=str(directory),
        vocabulary=number("vocab_size"),
        context=number("max_position_embeddings"),
        weight_bytes=sum(path.stat().st_size - _header(path) for path in weight_files(directory)),
        kv_values=2 * layers * number("num_key_value_heads", heads) * width,
        heads=heads,
        dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32"),
    )


def same_shape(one: Facts, other: Facts) -> bool:
    """Whether an engine that was started for one can take the weights of the other."""
    return (one.vocabulary, one.kv_values, one.heads) == (other.vocabulary, other.kv_values, other.heads)


def _attention_layers(fields: Mapping[str, Any], layers: int) -> int:
    """A hybrid model's other layers hold a state that does not grow."""
    kinds = fields.get("layer_types")
    if not isinstance(kinds, list):
        return layers
    return sum(kind != "linear_attention" for kind in kinds) or layers


def _header(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int(struct.unpack("<Q", file.read(8))[0])


@dataclass(frozen=True, slots=True)
class Plan:
    arguments: tuple[str, ...]
    environment: dict[str, str]
    context: int
    """Tokens of prompt and completion."""
    kv_bytes: int
    """On a CPU: reserved for keys and values; on a GPU vLLM takes what its share leaves."""
    weight_bytes: int
    canary_nats: float
    """By how much the log-probs of a version's canary may be off, on average."""


def plan(facts: Facts, settings: HostSettings, *, gpus: int, free_bytes: int) -> Plan:
    """Arguments and environment; `free_bytes` of memory (the accelerator's, where there is one).

    Raises `ModelDirectoryError` naming the setting and what would do.
    """
    dtype = facts.dtype if settings.vllm_dtype == "auto" else settings.vllm_dtype
    if dtype not in BYTES:
        raise ModelDirectoryError(
            f"{facts.directory}: weights are {dtype}; host.vllm_dtype says in what they are served: {', '.join(BYTES)}"
        )
    if settings.vllm_context > facts.context:
        raise ModelDirectoryError(
            f"host.vllm_context is {settings.vllm_context}; the model in {facts.directory} has {facts.context} "
            "positions"
        )
    ranks = settings.vllm_tensor_parallel
    if facts.heads % ranks:
        fitting = ", ".join(str(n) for n in range(1, facts.heads + 1) if facts.heads % n == 0)
        raise ModelDirectoryError(
            f"host.vllm_tensor_parallel is {ranks}; with {facts.heads} attention heads allowed are {fitting}"
        )
    if gpus and ranks > gpus:
        raise ModelDirectoryError(f"host.vllm_tensor_parallel is {ranks}; this machine has {gpus} GPUs")
    weights = facts.weight_bytes * BYTES[dtype] // BYTES.get(facts.dtype, BYTES[dtype])
    token = facts.kv_values * BYTES[dtype]
    kv = _gpu_kv(settings, weights, free_bytes * max(1, ranks)) if gpus else settings.vllm_kv_gb << 30
    _check_context(settings, kv // token)
    if not gpus and weights + kv + OVERHEAD_BYTES > free_bytes:
        left = max(0, free_bytes - weights - OVERHEAD_BYTES) >> 30
        would = f"leave {left} GiB" if left else f"are too few; {weights + OVERHEAD_BYTES + (1 << 30) >> 20} would do"
        raise ModelDirectoryError(
            f"host.vllm_kv_gb is {settings.vllm_kv_gb}: beside {weights >> 20} MiB of weights and "
            f"{OVERHEAD_BYTES >> 20} of the engine's own, {free_bytes >> 20} MiB of memory {would}"
        )
    cpu = not gpus
    arguments = _arguments(facts, settings, dtype, cpu=cpu)
    bound = CANARY_NATS[dtype] if settings.vllm_canary_nats is None else settings.vllm_canary_nats
    return Plan(arguments, _environment(settings, cpu=cpu), settings.vllm_context, kv, weights, bound)


def kv_fault(settings: HostSettings, free_bytes: int, hosts: int = 1) -> str | None:
    """Why this machine's memory does not hold what so many hosts of it are to reserve for keys and values, whatever the
    model; None where it may."""
    left = max(0, free_bytes - hosts * OVERHEAD_BYTES) // hosts >> 30
    if settings.vllm_kv_gb <= left:
        return None
    of, each = ("the engine's own", "") if hosts == 1 else (f"each of {hosts} hosts' own", " to each")
    return (
        f"host.vllm_kv_gb is {settings.vllm_kv_gb}: beside {OVERHEAD_BYTES >> 20} MiB of {of}, "
        f"{free_bytes >> 20} MiB of memory leave {left} GiB{each}"
    )


def _gpu_kv(settings: HostSettings, weights: int, free_bytes: int) -> int:
    return int(free_bytes * settings.vllm_memory_fraction) - weights


def _check_context(settings: HostSettings, fits: int) -> None:
    if settings.vllm_context > fits:
        raise ModelDirectoryError(
            f"host.vllm_context is {settings.vllm_context}; "
            f"there is memory for keys and values of {max(0, fits)} tokens, so allowed is a context up to that"
        )


def _arguments(facts: Facts, settings: HostSettings, dtype: str, *, cpu: bool) -> tuple[str, ...]:
    found: Sequence[str] = (
        "--model", facts.directory,
        "--served-model-name", "policy",
        "--dtype", dtype,
        "--max-model-len", str(settings.vllm_context),
        "--max-num-seqs", str(int(settings.capacity)),
        "--tensor-parallel-size", str(settings.vllm_tensor_parallel),
        # Token ids in, token ids out: what text they stand for is the rollout service's to know.
        "--skip-tokenizer-init",
        "--enable-scale-out",
        # Of the distribution that is sampled from, not of the logits before the temperature.
        "--logprobs-mode", "processed_logprobs",
        # What the directory recommends for sampling is not the run's setting.
        "--generation-config", "vllm",
        "--enable-prefix-caching",
        "--scheduling-policy", "priority",
        "--worker-extension-cls", "gyre_vllm_worker.Extension",
        "--middleware", "gyre_vllm_sampled.Sampled",
        "--disable-uvicorn-access-log",
    )  # fmt: skip
    own: Sequence[str] = ("--gpu-memory-utilization", str(settings.vllm_memory_fraction), "--enable-sleep-mode")
    if cpu:
        # Each switch to rollout is a start, and a start that compiles a model for the first time takes minutes.
        own = ("--enforce-eager",)
    return (*found, *own, *settings.vllm_arguments)


def _environment(settings: HostSettings, *, cpu: bool) -> dict[str, str]:
    found = {
        "VLLM_SERVER_DEV_MODE": "1",  # pausing, loading and sleeping are served in it only
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if cpu:
        found |= {
            "VLLM_CPU_KVCACHE_SPACE": str(settings.vllm_kv_gb),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(settings.threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin take the cores from everything else
        }
        if not any(one.replace("_", "-") == COMPILES for one in settings.vllm_arguments):
            # Eager or not, vLLM compiles a helper of its log-probs when the first call needs it, in each process anew.
            found["TORCHDYNAMO_DISABLE"] = "1"
    return found
