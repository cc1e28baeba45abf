"""`python -m examples.serving.load.victim HOST PORT BODY COUNT`: a client that waits to be killed.

It opens streams, reads a token of each, says so, and reads no more. Its parent then kills the
process, so that nobody closes what it has opened but the system.
"""

import socket
import sys
import time


def main(host: str, port: str, body: str, count: str) -> None:
    """Open the streams, then sleep."""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    streams = [socket.create_connection((host, int(port))) for _ in range(int(count))]
    for stream in streams:
        stream.sendall((head + body).encode())
    for stream in streams:
        read = b""
        while b"data: " not in read:
            more = stream.recv(1 << 16)
            if not more or b" 200 OK" not in (read := read + more):
                sys.exit(f"the server said {read!r}")
    print("ready", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
