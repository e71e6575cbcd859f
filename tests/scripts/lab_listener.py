"""On a host of the lab: says in a line each datagram that comes, and keeps one connection at a time open."""

from __future__ import annotations

import selectors
import socket
import sys

PORT = 5000


def main() -> None:
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("0.0.0.0", PORT))
    calls = socket.create_server(("0.0.0.0", PORT))
    ready = selectors.DefaultSelector()
    ready.register(datagrams, selectors.EVENT_READ)
    ready.register(calls, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        for key, _ in ready.select():
            if key.fileobj is datagrams:
                print(datagrams.recv(2000).decode()[:40], flush=True)
            elif key.fileobj is calls:
                connection, _ = calls.accept()
                ready.register(connection, selectors.EVENT_READ)
            else:
                said = key.fileobj.recv(65536)  # type: ignore[union-attr]
                if said:
                    key.fileobj.send(said[:1])  # type: ignore[union-attr]
                else:
                    ready.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]


if __name__ == "__main__":
    sys.exit(main())
