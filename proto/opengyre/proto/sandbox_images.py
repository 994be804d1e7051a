"""Images of a node: requests and answers of ``images``, ``add_image`` and ``remove_image``.

An image is the root that a sandbox begins with (`SandboxSpec.image`). It is added from an archive or a folder and is
there whole or not at all. Large archives are in the blob store, or already on the node.
"""

from opengyre.proto.base import Record


class ImagesRequest(Record, frozen=True, kw_only=True):
    """Ask for the images (verb ``images``, answered by `ImageList`)."""


class ImageInfo(Record, frozen=True, kw_only=True):
    """An image that is there."""

    image: str
    """Its name."""
    node: str
    """Where it is."""
    size: int
    """Bytes of its files."""
    used_at: float | None
    """When it was last used for a sandbox, or added: seconds since 1970; None where the backend does not keep it."""
    in_use: bool
    """A sandbox or a snapshot stands on it, so that it cannot be removed."""


class ImageList(Record, frozen=True, kw_only=True):
    """The images of a node."""

    images: tuple[ImageInfo, ...]
    """By name."""
    limit: int | None
    """Bytes that all of them may take together; None where the node does not bound it."""


class AddImageRequest(Record, frozen=True, kw_only=True):
    """Add an image, in the place of one with that name (verb ``add_image``, answered by `ImageAdding`).

    An addition goes on when nobody waits for it; asking again with the same fields joins it. One of ``blob`` and
    ``path`` is given.
    """

    image: str
    """Its name: 1 to 128 of ``A-Z a-z 0-9 _ . : -``, no dot first; where images are an engine's, slashes too."""
    blob: str | None = None
    """Reference of a tar archive of its root as ``docker export`` writes it, plain or compressed by gzip, bzip2 or
    xz."""
    path: str | None = None
    """Such an archive, or a folder that is its root, on the node, below a folder of its ``sandbox.image_roots``."""
    wait_s: float = 10.0
    """Most seconds until there is an answer, at most 60."""


class ImageAdding(Record, frozen=True, kw_only=True):
    """Where an addition is."""

    image: str
    """Its name."""
    node: str
    """Where it is added."""
    done: bool
    """False: it is under way; ask again."""
    unpacked: int
    """Bytes of its files so far."""
    info: ImageInfo | None = None
    """The image, once it is there."""


class RemoveImageRequest(Record, frozen=True, kw_only=True):
    """Remove an image that nothing stands on (verb ``remove_image``, answered by `ImageRemoved`)."""

    image: str
    """Its name."""


class ImageRemoved(Record, frozen=True, kw_only=True):
    """After this no sandbox can be made of it."""

    image: str
    """Its name."""
    freed: int
    """Bytes that it took."""
