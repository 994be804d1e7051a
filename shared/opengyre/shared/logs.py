"""Structured logs on stderr: one JSON object a line, with service, replica and whatever ids are bound.

`bound(run=..., group=..., execution=...)` adds ids to every line of the block, across awaits.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator

import structlog

from opengyre.shared.settings import LogSettings


def configure(settings: LogSettings, service: str, replica: str) -> None:
    """Send the standard library's and structlog's records through one renderer."""
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    console = settings.format == "console"
    renderer: structlog.types.Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()) if console else structlog.processors.JSONRenderer()
    )
    tail: list[structlog.types.Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if not console:
        tail.append(structlog.processors.dict_tracebacks)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[*tail, renderer]))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())
    for noisy in ("nats", "uvicorn.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    structlog.contextvars.bind_contextvars(service=service, replica=replica)


@contextlib.contextmanager
def bound(**ids: str | int) -> Iterator[None]:
    """Add ids to every record that is written in this block."""
    with structlog.contextvars.bound_contextvars(**ids):
        yield
