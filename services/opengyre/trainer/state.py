"""What the trainer of a run knows between updates: learner, record and the manifest of its version.

The weights of a version are written after its commit, from what was committed, so they can always be written again
and are the same. Blocking: runs in the trainer's torch thread.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from opengyre.policy.open import open_policy
from opengyre.proto.run import RunSpec
from opengyre.proto.weights import Manifest
from opengyre.shared.lifecycle import Context
from opengyre.tiny.config import ModelDirectoryError
from opengyre.trainer.checkpoint import CheckpointFormatError
from opengyre.trainer.learner import Learner, extra_files, read_policy, write_policy
from opengyre.trainer.store import Record, Store, clean_weights, prune_weights
from opengyre.weights.manifest import WeightsError, damaged, read
from opengyre.weights.write import version_directory

log = logging.getLogger("gyre.trainer")


@dataclass(slots=True)
class State:
    model: str
    """Directory of the run's initial model."""
    store: Store
    weights: Path
    learner: Learner
    record: Record
    manifest: Manifest
    keep: int
    reference: Manifest | None = None
    """The run's initial model as version 0, where the loss has a KL term to it."""

    def commit(self, record: Record) -> None:
        """Make the learner's present state the version of `record`."""
        self.record = self.store.commit(record, self.learner.save)
        self.manifest = _write(self.learner, self.weights, self.record)

    def prune(self) -> None:
        """Keep the newest checkpoints, and weights that a host may still be loading: published, or a base.

        Of what is published the checkpoint is kept too: weights are written again from it where they are damaged.
        """
        newest = range(self.record.version - self.keep + 1, self.record.version + 1)
        published = {self.record.published, *self._published_before()}
        if self.reference is not None:
            published.add(self.reference.version)
        self.store.prune({self.record.published})
        prune_weights(self.weights, {*newest, *published})

    def mend(self, version: int) -> list[str]:
        """Write again what is damaged of the weights of `version`, if they are in use; the names of these files.

        Raises `WeightsError` if the directory holds another version.
        """
        if self.reference is not None and version == self.reference.version:
            bad = damaged(Path(self.reference.directory))
            if bad:
                self.reference = _write_reference(Path(self.model), self.weights, self.record.run)
            return bad
        if version not in (self.record.version, self.record.published):
            return []
        directory = version_directory(self.weights, version)
        bad = damaged(directory)
        if bad:
            here = version == self.record.version
            policy = self.learner.policy if here else read_policy(self.store.directory(version))
            write_policy(policy, self.learner.extra, directory, self.record.run, version)
        return bad

    def published(self) -> Manifest | None:
        """The manifest of what is published, whole, where that is an older version than the record's; None, too, where
        it cannot be made whole: training goes on, and the next publication replaces it."""
        if self.record.published == self.record.version:
            return None
        try:
            self.mend(self.record.published)
            return read(version_directory(self.weights, self.record.published))
        except (WeightsError, ModelDirectoryError, CheckpointFormatError) as error:
            log.error("version %d cannot be published again: %s", self.record.published, error)  # noqa: TRY400 - a known fault
            return None

    def _published_before(self) -> set[int]:
        found = (int(path.name[1:]) for path in self.weights.glob("v[0-9]*"))
        older = sorted(version for version in found if version < self.record.published)
        return set(older[-1:])


def store_of(context: Context, run: str) -> Store:
    """The checkpoints of `run`."""
    return Store(context.state_dir.absolute() / "trainer" / run, context.settings.trainer.keep_checkpoints)


def open_state(context: Context, spec: RunSpec) -> State:
    """The last checkpoint, or the run's initial model as version 0. Raises `ModelDirectoryError`, `CheckpointError`."""
    store = store_of(context, spec.run)
    store.clean()
    record = store.latest()
    if record is None:
        model = Path(spec.model)
        if not model.is_dir():
            raise ModelDirectoryError(f"run {spec.run}: model {spec.model!r} is no directory on the trainer's machine")
        learner = Learner(model, spec.optimization, resume=False)
        record = store.commit(Record(run=spec.run, version=0, published=0), learner.save)
    else:
        store.check(record)
        learner = Learner(store.directory(record.version), spec.optimization, resume=True)
    weights = context.state_dir.absolute() / "weights" / spec.run
    clean_weights(weights)
    manifest = _write(learner, weights, record)
    reference = _write_reference(Path(spec.model), weights, spec.run) if spec.optimization.kl > 0 else None
    keep = context.settings.trainer.keep_checkpoints
    return State(spec.model, store, weights, learner, record, manifest, keep, reference)


def _write(learner: Learner, weights: Path, record: Record) -> Manifest:
    return learner.write_weights(version_directory(weights, record.version), record.run, record.version)


def _write_reference(model: Path, weights: Path, run: str) -> Manifest:
    """The initial model as version 0: what is there, unless it is damaged or gone. Raises `ModelDirectoryError`."""
    directory = version_directory(weights, 0)
    if not damaged(directory):
        return read(directory)
    return write_policy(open_policy(model), extra_files(model), directory, run, 0)
