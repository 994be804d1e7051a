"""A sandbox with an allow-list: what it reaches, and all the ways in which it does not reach more, on each backend.

There is no other machine to reach here: hosts are servers of the test on this machine's loopback, which the lists name.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

from opengyre.proto.sandbox import ForwardRequest, NetworkUse
from opengyre.sandbox import egress, proxy
from opengyre.sandbox.allowlist import PORT
from opengyre.sandbox.core import InvalidRequest, Spec
from opengyre.sandbox.manager import Manager
from opengyre.shared.embedded import hold_port
from support import both_backends
from support.both_backends import DEFAULTS, Box, Node, checks, until

pytestmark = [pytest.mark.sandbox, pytest.mark.asyncio(loop_scope="module")]

PYTHON = "/usr/bin/python3 -I -c"
# -I reads no PYTHON* variables; urllib reads http_proxy all the same.
FETCH = """
import sys, urllib.request, urllib.error
for url in sys.argv[1:]:
    try:
        with urllib.request.urlopen(url, data=b"x" * 300000 if "post" in url else None, timeout=20) as answer:
            print(answer.status, answer.read().decode())
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode().strip())
    except OSError as error:
        print(type(error).__name__, error)
"""
# Bytes to the proxy, and the first line and the last of what comes back.
RAW = """
import json, socket, sys
found = []
for text in json.load(sys.stdin):
    with socket.create_connection(("127.0.0.1", 3128), 20) as one:
        one.sendall(text.encode("latin-1"))
        data = b""
        while piece := one.recv(65536):
            data += piece
    found.append(data.decode("latin-1"))
print(json.dumps(found))
"""


class Host:
    """A server of the test that says what it was asked."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.port = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            self.requests.append(head)
            lines = [line.lower() for line in head.split("\r\n")]
            size = sum(int(line.split(":")[1]) for line in lines if line.startswith("content-length:"))
            body = f"got {len(await reader.readexactly(size))}".encode()
            path = head.split()[1]
            if path.startswith("/redirect/"):
                place = path.removeprefix("/redirect/")
                writer.write(f"HTTP/1.1 302 Found\r\nLocation: http://{place}/\r\nContent-Length: 0\r\n\r\n".encode())
            elif path == "/chunked":
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
            elif path == "/until-end":
                writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + b"y" * 100000)
            elif path == "/broken":
                writer.write(b"not HTTP at all\r\n\r\n")
            else:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()


@pytest_asyncio.fixture(loop_scope="module")
async def host() -> AsyncIterator[Host]:
    made = Host()
    server = await asyncio.start_server(made.answer, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    async with server:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def open_box(node: Node, request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., Any]]:
    """Make sandboxes with a list."""
    async with AsyncExitStack() as stack:

        async def make(*hosts: str, name: str = "") -> Box:
            name = name or f"w{abs(hash(request.node.name)) % 10**9}"
            await node.create(name, network="allowlist", allowed_hosts=hosts)
            stack.push_async_callback(node.manager.destroy, name)
            box = Box(node, name)
            if (await box.run("test -x /usr/bin/python3")).exit_code != 0:
                pytest.skip("the sandbox has no python3, which is the client here")
            return box

        yield make


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What names resolve to, in turn; the last one stays. An empty one is none."""
    known: dict[str, list[str]] = {}
    real = socket.getaddrinfo

    def resolve(name: Any, port: Any, *more: Any, **fields: Any) -> Any:
        text = name.decode() if isinstance(name, bytes) else name
        if text not in known:
            return real(name, port, *more, **fields)
        addresses = known[text]
        address = addresses.pop(0) if len(addresses) > 1 else addresses[0]
        if not address:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [one for part in address.split() for one in real(part, port, *more, **fields)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return known


async def fetch(box: Box, *urls: str) -> list[str]:
    done = await box.run(f"{PYTHON} '{FETCH}' {' '.join(urls)}", timeout_s=60.0)
    assert done.exit_code == 0, done.stderr
    return done.stdout.splitlines()


async def raw(box: Box, *texts: str) -> list[str]:
    done = await box.run_so(f"{PYTHON} '{RAW}'", timeout_s=60.0, stdin=json.dumps(texts).encode())
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def use(box: Box) -> NetworkUse:
    found = box.node.manager.stat(box.name).network
    assert found is not None
    return found


async def test_what_is_listed_is_reached_and_nothing_else(open_box, host: Host):
    box = await open_box("127.0.0.1")
    here = f"http://127.0.0.1:{host.port}"
    # The client asks for addresses of this loopback through no proxy unless it is told to.
    found = await fetch_listed(
        box, f"{here}/x", f"{here}/post", f"{here}/chunked", f"{here}/until-end", f"{here}/broken"
    )
    assert found[:3] == ["200 got 0", "200 got 300000", "200 abc"]
    assert found[3] == f"200 {'y' * 100000}"
    assert found[4].startswith(f"502 127.0.0.1:{host.port} gave no proper answer")
    assert (await fetch(box, "http://example.org/x")) == [
        "403 host 'example.org' may not be reached from here; allowed: 127.0.0.1"
    ]
    assert host.requests[0].startswith("GET /x HTTP/1.1\r\n")
    assert f"host: 127.0.0.1:{host.port}\r\n" in host.requests[0].lower()
    said = use(box)
    assert (said.allowed_hosts, said.requests, said.denied) == (("127.0.0.1",), 6, 1)
    assert said.denials == {"example.org:80": 1}
    assert said.sent_bytes > 300000
    assert said.received_bytes > 100000


async def fetch_listed(box: Box, *urls: str) -> list[str]:
    done = await box.run(f"no_proxy= NO_PROXY= {PYTHON} '{FETCH}' {' '.join(urls)}", 60.0, 1 << 20)
    assert done.exit_code == 0, done.stderr
    return done.stdout.splitlines()


async def test_a_tunnel_carries_bytes_both_ways_from_the_first_one(open_box, host: Host):
    box = await open_box("127.0.0.1")
    inner = "GET /x HTTP/1.1\r\nHost: inner\r\nConnection: close\r\n\r\n"
    [got] = await raw(box, f"CONNECT 127.0.0.1:{host.port} HTTP/1.1\r\nHost: 127.0.0.1:{host.port}\r\n\r\n{inner}")
    head, _, rest = got.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 ")
    assert rest.endswith("got 0")
    assert host.requests == [inner]
    assert use(box).sent_bytes == len(inner)


async def test_escape_a_direct_connection_out_fails(open_box, host: Host):
    box = await open_box("0.0.0.0/0", "::/0", "127.0.0.1")
    script = (
        "import socket, sys\n"
        "for address in ((\"127.0.0.1\", int(sys.argv[1])), (\"192.0.2.1\", 80), (\"1.1.1.1\", 53)):\n"
        "    try:\n        socket.create_connection(address, 2); print(\"connected\")\n"
        "    except OSError as error:\n        print(type(error).__name__)\n"
        "one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "try:\n    one.sendto(b\"x\", (\"1.1.1.1\", 53)); print(\"sent\")\n"
        "except OSError as error:\n    print(type(error).__name__)\n"
    )  # fmt: skip
    done = await box.run(f"{PYTHON} '{script}' {host.port}")
    assert done.stdout.split() == ["ConnectionRefusedError", "OSError", "OSError", "OSError"]
    assert (await box.run("cat /proc/net/route | wc -l")).stdout == "1\n"
    assert host.requests == []


async def test_escape_the_services_own_ports_are_not_reached(open_box, host: Host):
    """The bus, the engines and the API listen on this machine, on its loopback or on an address of its own."""
    box = await open_box("0.0.0.0/0", "::/0", "localhost", "example.org")
    own = socket.gethostbyname(socket.gethostname())
    # Addresses that lead to this loopback, in every spelling that somebody reads as one.
    hosts = ["127.0.0.1", "127.9.9.9", "0.0.0.0", "localhost", "LOCALHOST.", "[::1]", "[::]", "[::ffff:127.0.0.1]",
             "[::ffff:7f00:1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "2130706433", "0177.0.0.1", "0x7f.1", "127.1",
             "0", own]  # fmt: skip
    got = await raw(box, *(f"CONNECT {one}:{host.port} HTTP/1.0\r\n\r\n" for one in hosts))
    got += await raw(box, *(f"GET http://{one}:{host.port}/ HTTP/1.0\r\n\r\n" for one in hosts))
    for one, text in zip(hosts * 2, got, strict=True):
        assert text.startswith(("HTTP/1.1 403", "HTTP/1.1 400")), (one, text)
    assert host.requests == []


async def test_escape_a_name_is_connected_to_where_it_was_checked(open_box, host: Host, names: dict[str, list[str]]):
    """No second look-up, so none with another answer; and a listed name leads to no address that is not public."""
    names["rebinds.org"] = ["192.0.2.1", "127.0.0.1"]
    names["private.org"] = ["10.1.2.3"]
    names["metadata.org"] = ["169.254.169.254"]
    names["mixed.org"] = ["10.1.2.3 127.0.0.1"]
    names["good.org"] = ["127.0.0.1", "10.0.0.1"]
    outer = await open_box("rebinds.org", "private.org", "metadata.org", name="outer")
    ask = [
        f"CONNECT {name}:{host.port} HTTP/1.0\r\n\r\n"
        for name in ("rebinds.org", "rebinds.org", "private.org", "metadata.org")
    ]
    got = await raw(outer, *ask)
    assert [text.split()[1] for text in got] == ["403"] * 4, got
    assert "192.0.2.1 is not a public address" in got[0]
    assert "127.0.0.1 is not a public address" in got[1]
    assert host.requests == []
    inner = await open_box("good.org", "mixed.org", "127.0.0.1", name="inner")
    assert await fetch(inner, f"http://good.org:{host.port}/", f"http://mixed.org:{host.port}/") == ["200 got 0"] * 2
    assert names["good.org"] == ["10.0.0.1"], "it was looked up once"


async def test_escape_a_name_that_is_not_listed_is_not_looked_up(open_box, names: dict[str, list[str]]):
    """Who answers for a name learns that it was asked for, and what was put into it."""
    names["secret.evil.org"] = ["127.0.0.1", "127.0.0.2"]
    box = await open_box("127.0.0.0/8", "*.fine.org")
    assert (await fetch(box, "http://secret.evil.org/"))[0].startswith("403 host 'secret.evil.org' may not be reached")
    assert names["secret.evil.org"] == ["127.0.0.1", "127.0.0.2"]


async def test_escape_smuggled_targets_and_lines_reach_nobody(open_box, host: Host, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(proxy, "LINGER_S", 20.0)  # in which a client has sent all that it wanted to
    box = await open_box("127.0.0.1")
    at = f"127.0.0.1:{host.port}"
    got = await raw(
        box,
        f"CONNECT {at}:1 HTTP/1.0\r\n\r\n",
        f"CONNECT evil.org@{at} HTTP/1.0\r\n\r\n",
        f"CONNECT {at}@evil.org:443 HTTP/1.0\r\n\r\n",
        f"CONNECT {at}#.evil.org:443 HTTP/1.0\r\n\r\n",
        f"CONNECT {at}\x00.evil.org:443 HTTP/1.0\r\n\r\n",
        f"GET http://{at}/ HTTP/1.1\r\nHost: evil.org\r\n\r\n",
        f"GET http://{at}/ HTTP/1.1\r\nHost: {at}\r\nHost: evil.org\r\n\r\n",
        f"GET http://{at}/ HTTP/1.1\r\nHost: {at}\r\nX: a\rHost: evil.org\r\n\r\n",
        f"GET http://{at}/\rX: HTTP/1.1\r\nHost: {at}\r\n\r\n",
        f"GET http://{at}/ HTTP/1.1\r\nHost : {at}\r\n\r\n",
        f"POST http://{at}/ HTTP/1.1\r\nHost: {at}\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        f"POST http://{at}/ HTTP/1.1\r\nHost: {at}\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        f"POST http://{at}/ HTTP/1.1\r\nHost: {at}\r\nTransfer-Encoding: xchunked\r\n\r\nabc",
        "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        f"GET http://{at}/ HTTP/1.1\r\nHost: {at}\r\nX: {'x' * 70000}\r\n\r\n",
    )  # fmt: skip
    for text in got:
        assert text.startswith(("HTTP/1.1 400", "HTTP/1.1 431", "HTTP/1.1 501")), text
    assert host.requests == []


async def test_escape_one_request_a_connection(open_box, host: Host):
    """What follows a request is no second one, whatever a host makes of it."""
    box = await open_box("127.0.0.1")
    at = f"127.0.0.1:{host.port}"
    first = f"GET http://{at}/1 HTTP/1.1\r\nHost: {at}\r\nConnection: keep-alive\r\n\r\n"
    [got] = await raw(box, first + first.replace("/1", "/2"))
    assert got.count("HTTP/1.1 200") == 1
    assert [one.split()[1] for one in host.requests] == ["/1"]
    assert "connection: close" in host.requests[0].lower()


async def test_escape_a_redirect_leads_only_where_the_list_does(open_box, host: Host, names: dict[str, list[str]]):
    names["good.org"] = ["127.0.0.1"]
    box = await open_box("good.org", "127.0.0.1")
    assert await fetch(
        box,
        f"http://good.org:{host.port}/redirect/evil.org",
        f"http://good.org:{host.port}/redirect/good.org:{host.port}",
    ) == ["403 host 'evil.org' may not be reached from here; allowed: good.org, 127.0.0.1", "200 got 0"]


async def test_a_host_that_does_not_answer_is_a_sentence(open_box, names: dict[str, list[str]]):
    box = await open_box("127.0.0.1", "nowhere.invalid")
    names["nowhere.invalid"] = [""]
    with hold_port() as held:  # on which nobody listens, nor will
        port = held.getsockname()[1]
        got = await raw(
            box, f"CONNECT 127.0.0.1:{port} HTTP/1.0\r\n\r\n", "GET http://nowhere.invalid/ HTTP/1.0\r\n\r\n"
        )
    assert got[0].startswith("HTTP/1.1 502")
    assert f"127.0.0.1:{port} cannot be reached: Connect" in got[0]
    assert "the name 'nowhere.invalid' cannot be resolved" in got[1]


async def test_bounds_of_connections_and_of_silence(open_box, host: Host, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(egress, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(proxy, "HEAD_S", 5.0)  # in which the script has made its connections
    box = await open_box("127.0.0.1")
    script = (
        "import socket\n"
        "held = [socket.create_connection((\"127.0.0.1\", 3128), 20) for _ in range(3)]\n"
        "more = socket.create_connection((\"127.0.0.1\", 3128), 20)\n"
        "print(more.recv(100))\n"
        "print([one.recv(12) for one in held])\n"
    )  # fmt: skip
    done = await box.run(f"{PYTHON} '{script}'")
    assert done.stdout.splitlines() == ["b''", str([b"HTTP/1.1 408"] * 3)], done.stderr
    monkeypatch.setattr(proxy, "IDLE_S", 0.5)
    got = await raw(box, f"CONNECT 127.0.0.1:{host.port} HTTP/1.0\r\n\r\n")  # and nothing more
    assert got[0].startswith("HTTP/1.1 200")
    assert host.requests == []


async def test_what_is_made_of_a_sandbox_has_its_list_too(node: Node, open_box, host: Host):
    """Forks, restored ones and those that evaluate."""
    box = await open_box("127.0.0.1")
    url = f"http://127.0.0.1:{host.port}/x"
    get = f"no_proxy= NO_PROXY= {PYTHON} '{FETCH}' {url}"
    verdict = await node.manager.verify(checks("v", box.name, "separate", f"{get} | grep -qx '200 got 0'"))
    assert [part.passed for part in verdict.parts] == [1.0]
    await node.backend.snapshot(box.spec, "snap")
    await node.backend.fork("snap", Spec(sandbox="forked", network="allowlist", allowed_hosts=("127.0.0.1",)))
    try:
        done = await node.backend.exec(Spec(sandbox="forked", network="allowlist"), "e", get, 30.0, 1000)
        assert done.stdout == "200 got 0\n"
    finally:
        await node.backend.destroy("forked")
    await node.backend.restore(box.spec, "snap")
    await node.backend.drop("snap")
    assert await fetch_listed(box, url) == ["200 got 0"]
    with pytest.raises(InvalidRequest, match=f"port is {PORT}; allowed is another one"):
        await node.manager.forward(ForwardRequest(sandbox=box.name, port=PORT, host="127.0.0.1", target_port=1))
    with pytest.raises(InvalidRequest, match="allowed_hosts has 'a:1'; allowed are a host name"):
        await node.create("bad", network="allowlist", allowed_hosts=("a:1",))


async def test_an_empty_list_reaches_nothing_and_none_has_no_proxy(node: Node, open_box):
    box = await open_box()
    assert await fetch(box, "http://example.org/") == [
        "403 host 'example.org' may not be reached from here; allowed: no host"
    ]
    await node.create("plain")
    done = await Box(node, "plain").run("env | grep -ci proxy; cat /proc/net/tcp | wc -l")
    assert done.stdout == "0\n1\n"
    assert node.manager.stat("plain").network is None
    await node.manager.destroy("plain")


@pytest.mark.parametrize("kind", both_backends.BOTH)
async def test_a_service_that_starts_again_answers_again(tmp_path, kind: str, host: Host):
    """Also where something in the sandbox took the port meanwhile: once that has let go of it."""
    first = Manager(both_backends.backend(kind, tmp_path / "n"), "n0", DEFAULTS)
    node = Node(kind, tmp_path / "n")
    node.backend, node.manager = first._backend, first  # type: ignore[assignment]  # one of the two it is for
    await first.start()
    await node.create("s", network="allowlist", allowed_hosts=("127.0.0.1",))
    box = Box(node, "s")
    if (await box.run("test -x /usr/bin/python3")).exit_code != 0:
        await first.destroy("s")
        await first.stop()
        pytest.skip("the sandbox has no python3, which is the client here")
    url = f"http://127.0.0.1:{host.port}/x"
    assert await fetch_listed(box, url) == ["200 got 0"]
    await first.stop()
    node.backend = both_backends.backend(kind, tmp_path / "n")
    node.manager = Manager(node.backend, "n0", DEFAULTS)
    await node.manager.start()
    assert await fetch_listed(box, url) == ["200 got 0"]
    squat = f"{PYTHON} 'import socket, time; s = socket.create_server((\"127.0.0.1\", {PORT})); time.sleep(600)'"
    await node.backend._egress.close("s")
    squatting = asyncio.ensure_future(box.run(f"touch /tmp/up; {squat}", 60.0, exec_id="squat"))

    async def taken() -> bool:
        found = await box.run(f"grep -c ':{PORT:04X} 00000000:0000 0A' /proc/net/tcp")
        return found.stdout.strip() == "1"

    await until(taken)
    await node.manager._connect(box.spec)
    assert node.manager.stat("s").network is None
    await node.backend.kill("s", "squat")
    await squatting
    reaping = asyncio.ensure_future(node.manager.reap())
    try:

        async def there() -> bool:
            return node.manager.stat("s").network is not None

        await until(there)
        assert await fetch_listed(box, url) == ["200 got 0"]
    finally:
        reaping.cancel()
        await asyncio.wait([reaping])
        await node.manager.destroy("s")
        await node.manager.stop()
