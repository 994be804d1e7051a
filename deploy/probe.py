"""`python probe.py PORT [PATH]`: exit status 0 when the HTTP server in this container answers 200 there, else 1.

The path is /healthz by default; `PING` asks a Valkey instead, which may ask for a password. Bounded by `BOUND_S`.
"""

import http.client
import socket
import sys

BOUND_S = 4.0


def main() -> None:
    port, path = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "/healthz"
    try:
        good = ping(port) if path == "PING" else answers(port, path)
    except (OSError, http.client.HTTPException) as error:
        sys.exit(f"{path} on port {port}: {error!r}")
    sys.exit(0 if good else 1)


def answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=BOUND_S)
    connection.request("GET", path)
    response = connection.getresponse()
    print(response.status, response.read(500).decode("utf-8", "replace"))
    return response.status == http.client.OK


def ping(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=BOUND_S) as sock:
        sock.sendall(b"PING\r\n")
        return sock.recv(16).startswith((b"+PONG", b"-NOAUTH"))


if __name__ == "__main__":
    main()
