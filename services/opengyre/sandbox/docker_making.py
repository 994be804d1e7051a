"""Making and removing containers.

Awaits: an answer of the engine, bounded by `docker_engine.CALL_S`. One that makes or removes something is waited for
whatever happens to the caller: what the engine makes after a removal, nobody would remove.
"""

import asyncio
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress

import aiodocker
import msgspec

from opengyre.sandbox import docker_config, docker_host
from opengyre.sandbox.core import InfraError, InvalidRequest, SandboxError, Spec, unsupported
from opengyre.sandbox.discard import discard
from opengyre.sandbox.docker_base import Made
from opengyre.sandbox.docker_engine import NOT_FOUND, engine_errors, to_its_end
from opengyre.sandbox.docker_files import Files
from opengyre.sandbox.docker_spool import Place
from opengyre.sandbox.records import load, save


class Making(Files):
    """The part of the backend that is about containers."""

    async def _look_at_images(self) -> None:
        async with engine_errors("a list of images"):
            images = await self._engine.docker.images.list()
        tags = {tag for image in images for tag in image.get("RepoTags") or ()}
        self._images = sorted(tag for tag in tags if not tag.startswith(("gyre-snapshot-", "<none>")))

    async def create(self, spec: Spec, files: Mapping[str, str]) -> None:
        if spec.disk_mb is not None and not self._storage:
            raise unsupported("disk_limit", "disk_mb", "docker")
        if spec.image is not None and spec.image.startswith("/"):
            raise unsupported("root_directories", "image", "docker")
        await self._make(spec, files, spec.image)

    async def _make(self, spec: Spec, files: Mapping[str, str], image: str | None, token: str | None = None) -> None:
        """``image``: what it is made from, else the node's own. ``token``: of the one whose place it takes."""
        limit = docker_config.spool_limit(spec)
        made = Made(boot=self._boot, token=token or secrets.token_hex(6), spool_limit=limit)
        self._making[spec.sandbox] = made
        home = self._home(spec.sandbox, made)
        try:
            for name in ("execs", "spool"):
                (home / name).mkdir(parents=True, exist_ok=token is not None)
            save(self.folder(spec.sandbox) / "docker.json", made)
        except OSError as error:
            raise InfraError(f"sandbox {spec.sandbox!r} could not be made: {error}") from error
        made = await to_its_end(self._container(spec, made, image or self._image))
        place = self._place_of(spec.sandbox, made)
        if spec.image is not None:
            await self._folders(place)
        await self._first_files(place, files)
        made = msgspec.structs.replace(made, ready=True)
        save(self.folder(spec.sandbox) / "docker.json", made)
        self._live[spec.sandbox] = made
        self._making.pop(spec.sandbox, None)
        await self._egress.open(spec)

    async def _container(self, spec: Spec, made: Made, image: str) -> Made:
        control = str(self._home(spec.sandbox, made) / "spool")
        config = docker_config.container(
            spec, key=self._key, image=image, control=control, binds=self._binds, storage=self._storage
        )
        name = self._name(spec.sandbox, made)
        async with engine_errors(f"the creation of sandbox {spec.sandbox!r}"):
            try:
                container = await self._engine.docker.containers.create(config, name=name)
            except aiodocker.DockerError as error:
                if error.status != NOT_FOUND:
                    raise
                await self._look_at_images()
                words = ", ".join(self._images[:20]) or "none"
                raise InvalidRequest(f"image is {image!r}, which the engine has not; allowed: {words}") from error
            await container.start()
            shown = await container.show()
        if not shown["State"]["Running"]:
            raise InfraError(
                f"sandbox {spec.sandbox!r} ended at its start: {shown['State'].get('Error') or 'no reason'}"
            )
        made = msgspec.structs.replace(made, container=container.id, first=shown["State"]["Pid"])
        if spec.image is None:
            return msgspec.structs.replace(made, user=spec.user or made.user, cwd=spec.workdir or made.cwd)
        # The container's own settings are ours; what the image says is in the image.
        async with engine_errors(f"a look at image {image!r}"):
            own = (await self._engine.docker.images.inspect(spec.image))["Config"]
        cwd = own.get("WorkingDir") or ""
        return msgspec.structs.replace(
            made,
            user=spec.user or own.get("User") or "0:0",
            cwd=spec.workdir or (cwd if cwd.strip("/") else docker_config.WORKSPACE),
        )

    async def _folders(self, place: Place) -> None:
        """The folders that sandboxes have, where an image has not."""
        argv = docker_config.script('mkdir -p -- "$@" && chmod 1777 -- "$@"', *docker_config.FOLDERS)
        code, said = await self._helper(place, argv, user="0:0")
        if code:
            raise InfraError(f"sandbox {place.sandbox!r} could not be made: {said}")

    async def quiet(self, sandbox: str) -> None:
        made = self._record(sandbox)
        await asyncio.to_thread(docker_host.end_all, made.container, made.first)

    async def _unmake(self, sandbox: str, *, keep: bool) -> None:
        """Remove a container; its folder with it, unless that is to ``keep``."""
        await self._egress.close(sandbox)
        made = self._live.pop(sandbox, None) or self._making.pop(sandbox, None)
        folder = self.folder(sandbox)
        made = made or load(folder / "docker.json", Made)
        self._commands.leave(sandbox)
        try:
            if made is not None:
                async with engine_errors(f"the removal of sandbox {sandbox!r}"):
                    await self._engine.remove(made.container or self._name(sandbox, made))
        except SandboxError:
            # What is left is tried again by the next call.
            if made is not None:
                self._making[sandbox] = made
            raise
        await self._commands.forget(sandbox)
        if not keep and folder.exists():
            trash = self._root / "trash" / f"{sandbox}.{os.getpid()}.{next(self._numbers)}"
            with suppress(FileNotFoundError):  # another call was first
                folder.rename(trash)
            await asyncio.to_thread(discard, trash)
