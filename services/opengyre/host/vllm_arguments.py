"""Whether vLLM's server serves with `host.vllm_arguments`: its own parser says what they set, before anything starts.

What a host sets itself is refused: the server would be another than the host, the allocator and the run count on.

Blocking: not for the event loop.
"""

import functools
import json
import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from opengyre.host.vllm_process import SIDE
from opengyre.shared.vllm import VllmMissingError, own_environment

ASK_S = 120.0
"""Bound of the parser's answer; it takes 8 s, which vLLM's import is."""
_POLICY: Final = "the run's policy"
OWN: Final[Mapping[str, str | None]] = {
    "model": _POLICY,
    "model_tag": _POLICY,
    "served_model_name": _POLICY,
    "dtype": "host.vllm_dtype",
    "max_model_len": "host.vllm_context",
    "max_num_seqs": "host.capacity",
    "tensor_parallel_size": "host.vllm_tensor_parallel",
    "gpu_memory_utilization": "host.vllm_memory_fraction",
    **dict.fromkeys(
        (
            "host", "port", "uds", "grpc", "headless", "config", "api_key", "ssl_keyfile", "ssl_certfile",
            "ssl_ca_certs", "ssl_cert_reqs", "root_path", "skip_tokenizer_init", "enable_scale_out",
            "worker_extension_cls", "scheduling_policy", "enable_sleep_mode", "data_parallel_size", "api_server_count",
        )
    ),
}  # fmt: skip
"""What a host sets itself, as vLLM's parser names it, and by what; None: by nothing that can be set."""
_ELSEWHERE: Final = re.compile(
    r"ModuleNotFoundError: No module named 'vllm\.(entrypoints|utils)\b|ImportError: cannot import name .* from 'vllm\."
)
"""Another version of vLLM, whose parser is not where it is looked for."""


class VllmArgumentsError(Exception):
    """vLLM's server would not serve with these arguments; the message names the setting."""


def fault_of(dests: Collection[str]) -> str | None:
    """Of the names that the parser gives to what is set: a sentence about the first that is a host's own."""
    for dest, by in OWN.items():
        if dest not in dests:
            continue
        what = "the name of a model" if dest == "model_tag" else f"--{dest.replace('_', '-')}"
        if by is None:
            return f"host.vllm_arguments has {what}, with which a host could not speak to its server; leave it out"
        if by == _POLICY:
            return f"host.vllm_arguments has {what}; a host serves {by}, so leave it out"
        return f"host.vllm_arguments has {what}, which a host takes from {by}; set that instead"
    return None


def checked_arguments(python: str, arguments: Sequence[str]) -> None:
    """Ask the vLLM of `python` what these arguments set; nothing is asked where there are none.

    Blocking, `ASK_S` at most. Raises `VllmArgumentsError`, or `VllmMissingError` where it does not answer.
    """
    if not arguments:
        return
    if "--" in arguments:
        raise VllmArgumentsError("host.vllm_arguments has --, after which vLLM takes no arguments; leave it out")
    # A file of arguments is read in place of its name; what it says later is not what it says now.
    fault = fault_of({"config"}) if "--config" in arguments else fault_of(_set_by(python, tuple(arguments)))
    if fault is not None:
        raise VllmArgumentsError(fault)


@functools.lru_cache(maxsize=16)  # a command looks when it begins and again when it starts a stack
def _set_by(python: str, arguments: tuple[str, ...]) -> frozenset[str]:
    environment = {**own_environment(), "PYTHONPATH": str(SIDE)}
    try:
        done = subprocess.run(
            [python, "-m", "gyre_vllm_arguments", *arguments], env=environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors="replace", timeout=ASK_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise VllmMissingError(f"host.vllm_python: {python} does not say what host.vllm_arguments set") from error
    if done.returncode:
        said = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1].strip()
        if _ELSEWHERE.match(said):
            return frozenset()
        raise VllmArgumentsError(
            f"vLLM refuses host.vllm_arguments ({said}); allowed are arguments of its server, `vllm serve`"
        )
    found = _names(done.stdout)
    if found is None:
        raise VllmArgumentsError(
            f"vLLM serves nothing with host.vllm_arguments ({' '.join(arguments)}): it ends before it starts; "
            "allowed are arguments with which it serves"
        )
    return found


def _names(said: str) -> frozenset[str] | None:
    """Of the last line; None where it is not the answer."""
    try:
        found: Any = json.loads((said.strip().splitlines() or [""])[-1])
    except ValueError:
        return None
    return frozenset(map(str, found)) if isinstance(found, list) else None
