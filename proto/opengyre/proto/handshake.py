"""Whether a host may serve a run: what its engine does against what the run trains on. Pure.

A host says how its engine samples (`HostStatus.sampler`) before it is in the rollout role. Who decides on cells and who
routes calls ask here, so that none is refused by one and used by the other.
"""

from opengyre.proto.host import HostState, HostStatus, Sampler
from opengyre.proto.run import RunSpec


def refusal(spec: RunSpec, host: HostStatus) -> str | None:
    """Why the host does not serve the run, in a sentence that names the setting, its value and what is allowed; None
    where it may, or where its engine has not begun to sample."""
    if host.sampler is not None:
        return differs(spec, host.sampler)
    if host.state is HostState.ROLLOUT:
        return "its engine does not say how it samples; allowed is one that says it in its status (sampler)"
    return None


def differs(spec: RunSpec, sampler: Sampler) -> str | None:
    """The first setting by which the engine's log-probs would not be those that the run trains on, in a sentence."""
    temperature, serving = spec.harness.temperature, spec.serving
    if sampler.temperature not in (None, temperature):
        return (
            f"its engine samples at temperature {sampler.temperature:g}, whatever a call says; allowed is the call's "
            f"own, or {temperature:g} (harness.temperature)"
        )
    whole = "since the trainer's log-probs are of the whole distribution"
    for name, value, neutral in (
        ("top_p", sampler.top_p, 1.0),
        ("top_k", sampler.top_k, 0),
        ("min_p", sampler.min_p, 0.0),
        ("repetition_penalty", sampler.repetition_penalty, 1.0),
    ):
        if value != neutral:
            return f"its engine samples with {name} {value:g}; allowed is {neutral:g}, {whole}"
    if sampler.processors:
        return f"its engine changes logits by {', '.join(sampler.processors)}; allowed is nothing, {whole}"
    # At temperature 1 and without the above, raw log-probs are those of the distribution that is sampled from.
    if sampler.logprobs != "processed" and (sampler.logprobs, temperature) != ("raw", 1.0):
        also = "" if sampler.logprobs != "raw" else f", since harness.temperature is {temperature:g}"
        return f"its engine's log-probs are {sampler.logprobs}; allowed are processed ones{also}"
    for name, value, allowed, setting in (
        ("computes in", sampler.dtype, serving.dtype, "serving.dtype"),
        ("keeps keys and values in", sampler.kv_dtype, serving.kv_dtype or sampler.dtype, "serving.kv_dtype"),
    ):
        if allowed is not None and value != allowed:
            return f"its engine {name} {value}; allowed is {allowed} ({setting})"
    if sampler.quantization != serving.quantization:
        none = "none"
        return (
            f"its engine's quantization of weights is {sampler.quantization or none}; allowed is "
            f"{serving.quantization or none} (serving.quantization)"
        )
    for setting, on, wished in (
        ("chunked_prefill", sampler.chunked_prefill, serving.chunked_prefill),
        ("prefix_caching", sampler.prefix_caching, serving.prefix_caching),
    ):
        if wished is not None and on is not wished:
            return f"its engine's {setting} is {_said(on)}; allowed is {_said(wished)} (serving.{setting})"
    return None


def _said(on: bool) -> str:
    return "on" if on else "off"
