"""What a request to the proxy asks for, and the messages that go on from it. Pure; the parser is `h11`.

Invariants: what is checked is what is used: the host and the port are read once, the request that goes on is made
anew with them, in the form of an origin server, with one framing and with none of what is between two parties only;
what can be read in two ways is refused.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import h11

from opengyre.sandbox.allowlist import HostError, Target, target

Header = tuple[bytes, bytes]

HTTP_PORT = 80
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(?::([0-9]{1,5}))?")
_ABSOLUTE = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)([/?][^#]*)?")
# Between a sender and the next one only (RFC 9110, 7.6.1), and what is made anew.
_ONE_HOP = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te",
     b"trailer", b"transfer-encoding", b"upgrade", b"expect")
)  # fmt: skip


class RefusedError(Exception):
    """A status and a sentence for the client."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence


@dataclass(frozen=True)
class Asked:
    """What a request wants."""

    target: Target
    port: int
    onward: h11.Request | None
    """What is sent to the host; None for a tunnel."""

    @property
    def authority(self) -> str:
        return authority(self.target, self.port)


def authority(wanted: Target, port: int) -> str:
    """``host:port``, with brackets where the host needs them."""
    host = f"[{wanted.host}]" if ":" in wanted.host else wanted.host
    return f"{host}:{port}"


def _split(text: str, default: int | None) -> tuple[Target, int]:
    found = _AUTHORITY.fullmatch(text)
    port = default if found is None or found[2] is None else int(found[2])
    if found is None or port is None or not 0 < port < 1 << 16:
        raise RefusedError(400, f"the target {text[:200]!r} is not host:port; allowed is that and nothing beside it")
    try:
        return target(found[1]), port
    except HostError as error:
        raise RefusedError(400, str(error)) from error


def _values(headers: Iterable[Header], name: bytes) -> list[bytes]:
    return [value for key, value in headers if key == name]


def asked(request: h11.Request) -> Asked:
    """Read a request; raises `RefusedError`."""
    text = request.target.decode("ascii", "replace")
    headers: list[Header] = list(request.headers)
    framing = _framing(request, headers)
    if request.method == b"CONNECT":
        wanted, port = _split(text, None)
        if framing:
            raise RefusedError(400, "CONNECT has a body; allowed is it without Content-Length and Transfer-Encoding")
        _same_host(headers, wanted, port, default=port)
        return Asked(wanted, port, None)
    found = _ABSOLUTE.fullmatch(text)
    if found is None:
        raise RefusedError(400, "this is a proxy; allowed are CONNECT host:port and requests for http://host/path")
    if found[1].lower() != "http":
        raise RefusedError(400, f"the scheme is {found[1][:20]!r}; allowed are http, and CONNECT for all others")
    wanted, port = _split(found[2], HTTP_PORT)
    _same_host(headers, wanted, port, default=HTTP_PORT)
    path = found[3] or "/"
    host = authority(wanted, port) if port != HTTP_PORT else authority(wanted, port).removesuffix(f":{HTTP_PORT}")
    onward = h11.Request(
        method=request.method,
        target=path if path.startswith("/") else f"/{path}",
        headers=[(b"host", host.encode()), *_kept(headers, b"host", b"content-length"), *framing, _CLOSE],
    )
    return Asked(wanted, port, onward)


_CLOSE: Header = (b"connection", b"close")


def _framing(request: h11.Request, headers: list[Header]) -> list[Header]:
    """How the body's end is known, in one way."""
    lengths, codings = _values(headers, b"content-length"), _values(headers, b"transfer-encoding")
    if codings and (lengths or request.http_version != b"1.1"):
        raise RefusedError(400, "the body's end is told in two ways; allowed is Content-Length, or chunked in HTTP/1.1")
    if codings:
        return [(b"transfer-encoding", b"chunked")]  # h11 reads no other
    return [(b"content-length", lengths[0])] if lengths else []


def _same_host(headers: list[Header], wanted: Target, port: int, *, default: int) -> None:
    for value in _values(headers, b"host"):
        if value and _split(value.decode("ascii", "replace"), default) != (wanted, port):
            raise RefusedError(
                400, f"Host is another one than the target {authority(wanted, port)}; allowed is the same in both"
            )


def _kept(headers: list[Header], *without: bytes) -> list[Header]:
    """What goes on to the next party."""
    named = {word.strip().lower() for value in _values(headers, b"connection") for word in value.split(b",")}
    return [(name, value) for name, value in headers if name not in _ONE_HOP | named and name not in without]


def answer(response: h11.Response) -> h11.Response:
    """A host's answer as the client gets it; the connection ends with it."""
    return h11.Response(
        status_code=response.status_code, reason=response.reason, headers=[*_kept(list(response.headers)), _CLOSE]
    )


def refusal(status: int, sentence: str) -> tuple[h11.Response, bytes]:
    """The answer to what is refused: a sentence."""
    body = f"{sentence}\n".encode("ascii", "replace")
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode()), _CLOSE]
    return h11.Response(status_code=status, headers=headers), body
