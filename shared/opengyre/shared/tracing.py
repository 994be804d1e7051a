"""OpenTelemetry traces through the bus: the context travels in the `traceparent` header.

Without an exporter (`OTEL_EXPORTER_OTLP_ENDPOINT` unset) spans are not recorded, and headers carry no trace.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

_tracer = trace.get_tracer("opengyre")


def configure(service: str, replica: str, exporter: SpanExporter | None = None) -> TracerProvider | None:
    """Record spans if there is somewhere to send them; the provider's `shutdown` flushes them."""
    if exporter is None:
        if not os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
            return None
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter()
    provider = TracerProvider(
        resource=Resource.create({"service.name": f"gyre-{service}", "service.instance.id": replica})
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return provider


def inject(headers: dict[str, str]) -> None:
    """Add the present span's context to message headers."""
    propagate.inject(headers)


@contextlib.contextmanager
def span(name: str, **attributes: Any) -> Iterator[trace.Span]:
    """A span below the present one."""
    with _tracer.start_as_current_span(name, attributes=attributes) as current:
        yield current


@contextlib.contextmanager
def consuming(subject: str, headers: Mapping[str, str]) -> Iterator[trace.Span]:
    """A span for handling a message, below the span that published it."""
    context = propagate.extract(headers)
    with _tracer.start_as_current_span(f"consume {subject}", context=context, kind=trace.SpanKind.CONSUMER) as current:
        yield current
