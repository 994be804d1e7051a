"""What COPY of a Dockerfile brings where: members of a build context as an archive for one folder. Pure."""

import fnmatch
import posixpath

from opengyre.tasks.archives import chosen, members
from opengyre.tasks.dockerfile import Copy
from opengyre.tasks.errors import TaskError


def copied(context: bytes, step: Copy) -> tuple[str, bytes, tuple[str, ...]]:
    """A folder of the environment, the archive to unpack there, and the absolute paths that come of it.

    ``context``: a plain archive. A folder's content is copied, not the folder; raises `TaskError` where a source is
    not in the context.
    """
    kinds = {member.name: member.isdir() for member in members(context)}
    pairs: list[tuple[str, str]] = []
    for source in step.sources:
        found = ["."] if source == "." else [name for name in kinds if _matches(name, source)]
        if not found:
            raise TaskError(f"Dockerfile line {step.line}: {source!r} is not in the build context")
        pairs += [(name, _new_name(name, step, folder=name == "." or kinds[name])) for name in found]
    if step.folder or all(name == "." or kinds[name] for name, _ in pairs):
        folder = step.target
    else:
        folder = posixpath.dirname(step.target)
    archive = chosen(context, pairs)
    tops = dict.fromkeys(member.name.split("/")[0] for member in members(archive))
    return folder, archive, tuple(posixpath.join(folder, top) for top in tops)


def _new_name(name: str, step: Copy, *, folder: bool) -> str:
    if folder:
        return ""
    return posixpath.basename(name) if step.folder else posixpath.basename(step.target)


def _matches(name: str, pattern: str) -> bool:
    """As Docker's patterns: a star does not reach over a slash."""
    parts, wanted = name.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(
        fnmatch.fnmatchcase(part, want) for part, want in zip(parts, wanted, strict=True)
    )
