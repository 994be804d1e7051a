"""Weight versions (stream WEIGHTS): manifests only; tensors never travel on the bus."""

from typing import ClassVar

from opengyre.proto import subjects
from opengyre.proto.base import Event, Record


class ShardFile(Record, frozen=True, kw_only=True):
    name: str
    sha256: str
    bytes: int


class Manifest(Record, frozen=True, kw_only=True):
    """What a version consists of."""

    run: str
    version: int
    parent: int | None
    step: int
    directory: str
    files: tuple[ShardFile, ...]
    format: str = "safetensors"


class WeightsPublished(Event, frozen=True, kw_only=True, tag="weights.published.v1"):
    stream: ClassVar[str] = subjects.WEIGHTS
    run: str
    manifest: Manifest

    def event_id(self) -> str:
        return f"weights-{self.run}-{self.manifest.version}-published"


class WeightsApplied(Event, frozen=True, kw_only=True, tag="weights.applied.v1"):
    """A host serves this version now."""

    stream: ClassVar[str] = subjects.WEIGHTS
    run: str
    version: int
    host: str
    boot: str
    """Identity of the host's process: after a restart it applies again."""
    duration_s: float

    def event_id(self) -> str:
        return f"weights-{self.run}-{self.version}-{self.host}-{self.boot}-applied"


class WeightsRefused(Event, frozen=True, kw_only=True, tag="weights.refused.v1"):
    """A host did not take this version, and why (a checksum, a missing shard)."""

    stream: ClassVar[str] = subjects.WEIGHTS
    run: str
    version: int
    host: str
    boot: str
    error: str

    def event_id(self) -> str:
        return f"weights-{self.run}-{self.version}-{self.host}-{self.boot}-refused"


WeightsEvent = WeightsPublished | WeightsApplied | WeightsRefused
