"""A blocking client of the REST API, for the verbs that ask once and print.

Where the API is: `--gateway` and `--api-key` (or `GYRE_GATEWAY_URL` and `GYRE_API_KEY`), else `stack.json` of the state
directory. Every fault is a `ClientError` of one sentence.
"""

import http.client
import sys
import time
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode, urlsplit

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from opengyre.cli import stack as stacks
from opengyre.cli.stack import StackError
from opengyre.proto.ids import BadIdentifierError, check_token

TIMEOUT_S = 40.0
PIPED_WIDTH = 120
"""Columns of what is piped, but for tables of names: see `show_listing`."""
console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
LISTING_WIDTH = 1 << 14
errors = Console(stderr=True, highlight=False)

GatewayOption = Annotated[
    str | None, typer.Option("--gateway", envvar="GYRE_GATEWAY_URL", help="URL of the API; default: the stack's.")
]
KeyOption = Annotated[str | None, typer.Option("--api-key", envvar="GYRE_API_KEY", help="Default: the stack's.")]
StateDirOption = Annotated[
    Path | None, typer.Option("--state-dir", help="Directory of the stack's state; default: setting state_dir (.gyre).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class ClientError(StackError):
    """The API refused, or does not answer. `status` is 0 when there was no answer."""

    def __init__(self, status: int, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def passing(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status in (0, 429, 502, 503)


class Api:
    """The REST API at `url`."""

    def __init__(self, url: str, key: str | None, timeout_s: float = TIMEOUT_S) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ClientError(0, f"gateway is {url!r}; allowed is a URL like http://127.0.0.1:8080")
        self.url = url.rstrip("/")
        self._secure = parts.scheme == "https"
        self._host, self._port, self._base = parts.hostname, parts.port, parts.path.rstrip("/")
        self._key = key
        self._timeout_s = timeout_s

    def get(self, path: str, **query: Any) -> Any:
        """The answer's JSON; parameters that are None are left out."""
        given = {name: value for name, value in query.items() if value is not None}
        return self._request("GET", f"{path}?{urlencode(given)}" if given else path, None)

    def post(self, path: str, body: Any = None) -> Any:
        return self._request("POST", path, body)

    def patch(self, path: str, body: Any) -> Any:
        return self._request("PATCH", path, body)

    def patiently(self, method: str, path: str, body: Any, patience_s: float) -> Any:
        """Repeat while the fault may pass, `patience_s` at most. The request must be idempotent."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return self._request(method, path, body)
            except ClientError as error:
                if not error.passing or time.monotonic() + error.retry_after_s > deadline:
                    raise
                time.sleep(error.retry_after_s)

    def _request(self, method: str, path: str, body: Any) -> Any:
        headers = {"Accept": "application/json"}
        payload = None
        if body is not None:
            payload = msgspec.json.encode(body)
            headers["Content-Type"] = "application/json"
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.request(method, self._base + path, payload, headers)
            reply = connection.getresponse()
            content = reply.read()
        except (OSError, http.client.HTTPException) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
            raise ClientError(0, f"the gateway at {self.url} does not answer ({why}); `gyre up` starts one") from error
        finally:
            connection.close()
        if reply.status >= 400:
            after = reply.headers.get("Retry-After", "")
            raise ClientError(reply.status, _sentence(reply.status, content), float(after) if after.isdigit() else 1.0)
        try:
            return msgspec.json.decode(content) if content else None
        except msgspec.DecodeError as error:
            raise ClientError(reply.status, f"{self.url} is no gateway of ours: {error}") from error


def _sentence(status: int, content: bytes) -> str:
    try:
        document = msgspec.json.decode(content)
        return str(document["detail"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"the gateway answered {status}: {content[:200].decode('utf-8', 'replace')}"


def connect(gateway: str | None, api_key: str | None, state_dir: Path | None) -> Api:
    """The API that the options name, or the one of the stack in the state directory."""
    if gateway:
        return Api(gateway, api_key)
    directory = stacks.directory(state_dir)
    there = stacks.read(directory)
    if there is None:
        raise ClientError(0, stacks.absent(directory, "--gateway"))
    return Api(there.gateway, api_key or there.api_key)


def show_json(value: Any) -> None:
    """One line of JSON on stdout."""
    print(msgspec.json.encode(value).decode())


def show_listing(table: Table) -> None:
    """A table of things that other verbs take by their names: these are whole on a terminal of any width, and on one
    line in a pipe.
    """
    for column in table.columns:
        column.overflow = "fold"
    listing_console().print(table)


def listing_console() -> Console:
    """The terminal as it is, or a pipe, whose lines are as long as they have to be."""
    return console if sys.stdout.isatty() else Console(highlight=False, width=LISTING_WIDTH)


def number(value: Any, digits: int = 2) -> str:
    """A figure for a table."""
    return "-" if value is None else f"{value:.{digits}f}"


def segment(name: str, value: str) -> str:
    """An identifier as a part of a path; raises `ClientError` for what can be none."""
    try:
        return check_token(name, value)
    except BadIdentifierError as error:
        raise ClientError(0, str(error)) from error
