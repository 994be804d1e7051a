"""Requests that are drawn from the gateway's own OpenAPI document: none is answered with a fault of the server."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from opengyre.gateway import examples
from opengyre.proto import subjects
from opengyre.proto.decision import GroupEntry
from opengyre.proto.task import Check, TaskSpec, TaskSubmitted
from opengyre.shared.bus import Bucket, Bus, serving
from opengyre.trajectory.answers import Answers
from support.gateway_fakes import FakeAllocator, gateway_on, log_of, spoil

EXAMPLES = 12
"""Of each operation and each kind, those that the document allows and those that it does not."""
BOUND_S = 60.0
EXECUTION = "demo-g000003-e00"
THERE = {"run": "demo", "task": "write-000001", "group": "demo-g000003", "execution": EXECUTION}
"""What is in the streams, between messages that are no events."""


def streams(operation: Any) -> bool:
    """Whether it answers for as long as it is listened to."""
    answers = operation.definition.raw.get("responses", {}).values()
    return any("text/event-stream" in answer.get("content", {}) for answer in answers)


def drawn(document: dict[str, Any], url: str) -> Counter[int]:
    """Ask; how often each status was the answer. Fails at the first fault."""
    answered: Counter[int] = Counter()
    faults: list[str] = []

    def ask(operation: Any, mode: GenerationMode) -> None:
        @settings(
            max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, phases=(Phase.generate,),
            suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large),
        )  # fmt: skip
        @given(operation.as_strategy(generation_mode=mode))
        def once(case: Any) -> None:
            if mode is GenerationMode.POSITIVE and operation.method.upper() == "GET":
                # Drawn names are of nothing that there is.
                case.path_parameters.update({name: THERE[name] for name in case.path_parameters if name in THERE})
            try:
                answer = case.call(base_url=url, timeout=BOUND_S)
            except requests.exceptions.RequestException as error:
                # What the client cannot even write (a header with a line break) is no request.
                if not isinstance(error, requests.exceptions.InvalidHeader | requests.exceptions.InvalidURL):
                    faults.append(f"{case.method} {case.formatted_path}: {error!r}")
                return
            answered[answer.status_code] += 1
            if answer.status_code >= 500:
                faults.append(f"{case.as_curl_command()}: {answer.status_code} {answer.text[:300]}")

        once()

    schema = schemathesis.openapi.from_dict(document)
    for found in schema.get_all_operations():
        operation: Any = found.ok()  # type: ignore[union-attr] - raises where the document is wrong
        if not streams(operation):
            # One without parameters cannot be asked wrongly.
            given_something = {"parameters", "requestBody"} & operation.definition.raw.keys()
            for mode in (GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if given_something else [])):
                ask(operation, mode)
    assert faults == [], "\n".join(faults[:5])
    return answered


async def test_no_request_of_the_document_is_a_fault_of_the_server(bus: Bus, tmp_path: Path) -> None:
    async with (
        gateway_on(bus, tmp_path) as gateway,
        FakeAllocator("demo").answering(bus),
        serving(bus, "trajectory", "any", Answers(bus, gateway.context.blobs).endpoints()),
    ):
        await gateway.given(201, "POST", "/v1/runs", examples.RUN_IN)
        spec = TaskSpec(task=THERE["task"], instruction="x", checks=(Check(name="a", command="true", weight=1.0),))
        await bus.publish(
            subjects.task("demo", spec.task, "submitted"), TaskSubmitted(run="demo", task=spec.task, spec=spec)
        )
        entry = GroupEntry(
            run="demo", group=THERE["group"], task=spec.task, sequence=0, purpose="train", state="trained",
            executions=(EXECUTION,), admitted_version=1, dispatched=True, consumed_version=3,
        )  # fmt: skip
        await Bucket(bus, subjects.KV_LEDGER, GroupEntry).put(entry.group, entry)
        for subject, event in log_of(EXECUTION, (EXECUTION,), spec):
            await bus.publish(subject, event)
        await spoil(bus, EXECUTION, spec.task)
        document = await gateway.given(200, "GET", "/openapi.json")
        answered = await asyncio.to_thread(drawn, document, gateway.url)
    assert answered[200] > 20, answered
    assert answered[422] + answered[400] > 20, answered
