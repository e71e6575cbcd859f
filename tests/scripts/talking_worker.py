"""A worker without torch, for tests of agent and coordinator: says Hello, then behaves as its argument tells.

obey       answers every order at once, until Stop. Each Abort is answered with the time it arrived (in
           nanoseconds of the monotonic clock, as a LinkBroken's detail) and a Ready
impostor   says Hello with a wrong secret, and exits with 3 when it is hung up on
last-words says Failed, writes a line to stderr and exits with 7
stubborn   ignores SIGTERM, SIGINT and Stop
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator

from farandole.base.env import read_worker_env
from farandole.base.membership import DataAddress
from farandole.base.wire.frames import TO_WORKER, WORKER_FRAME_LIMIT, FrameBuffer, decode, encode, frame
from farandole.base.wire.link_messages import (
    Abort,
    Elastic,
    Failed,
    Hello,
    LinkBroken,
    Newcomer,
    Prepare,
    Ready,
    Start,
    Stop,
    Synced,
    ToWorker,
    WorkerMessage,
)
from farandole.base.wire.message import PROTOCOL_VERSION


class Conversation:
    """The worker's end of the connection to its agent."""

    def __init__(self, secret: str | None = None) -> None:
        env = read_worker_env()
        assert env is not None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(30.0)
        address = env.agent_address
        self._socket.connect(b"\0" + address[1:].encode() if address.startswith("@") else address)
        self.say(Hello(env.worker, secret or env.secret, os.getpid(), PROTOCOL_VERSION, DataAddress("127.0.0.1", 1)))

    def say(self, message: WorkerMessage) -> None:
        self._socket.sendall(frame(encode(message)))

    def heard(self) -> Iterator[ToWorker]:
        """What is said to this worker, until it is hung up on."""
        buffer = FrameBuffer(WORKER_FRAME_LIMIT)
        while data := self._socket.recv(1 << 16):
            for payload in buffer.feed(data):
                yield decode(TO_WORKER, payload)


def obey() -> None:
    conversation = Conversation()
    for order in conversation.heard():
        if isinstance(order, Abort):
            arrived = str(time.monotonic_ns())
            conversation.say(LinkBroken(order.number, "", "receive", arrived))
            conversation.say(Ready(order.number))
        elif isinstance(order, Prepare):
            conversation.say(Ready(order.number))
        elif isinstance(order, Start | Newcomer):
            conversation.say(Elastic())
        if isinstance(order, Start):
            conversation.say(Synced(order.id.number))
        if isinstance(order, Stop):
            return


def impostor() -> None:
    for _ in Conversation(secret="not this one").heard():
        pass
    sys.exit(3)


def last_words() -> None:
    conversation = Conversation()
    conversation.say(Failed("ValueError: bad", "Traceback"))
    print("the last line", file=sys.stderr)
    sys.exit(7)


def stubborn() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    for _ in Conversation().heard():
        pass
    signal.pause()


if __name__ == "__main__":
    {"obey": obey, "impostor": impostor, "last-words": last_words, "stubborn": stubborn}[sys.argv[1]]()
