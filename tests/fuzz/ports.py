"""Every port, with inputs that nobody sends on purpose. After them a real peer has to be served as before."""

from __future__ import annotations

import asyncio
import contextlib
import random
import selectors
import socket
import threading
from collections.abc import Callable, Sequence

from farandole.base.config import JobConfig
from farandole.base.events.event import Event
from farandole.base.machine import now_s
from farandole.base.membership import Address, GenerationId
from farandole.base.wire.authentication import DialerHandshake, Introduction, Purpose, Role, new_token
from farandole.base.wire.encryption import EncryptedStream, load_certificates
from farandole.base.wire.frames import encode, frame
from farandole.base.wire.link_messages import Hello
from farandole.base.wire.message import PROTOCOL_VERSION
from farandole.base.wire.messages import Welcome
from farandole.job.agent.worker_server import WorkerServer
from farandole.job.coordinator.server import Coordinator, CoordinatorSetup
from farandole.job.launch.control_client import Client
from farandole.training.collectives.data_listener import DataListener
from farandole.training.collectives.point_to_point import CHANNEL, Incoming
from farandole.training.collectives.ring_builder import Dialer
from tests.fuzz.decoders import HELLO_TO_STORE, store_requests
from tests.fuzz.inputs import mutated, pieces, valid_messages

DEADLINE_S = 60.0


class Ports:
    """All listeners of a job, in this process; `close()` them. Raises AssertionError where one does not serve.

    tls  a folder of certificates: those of TCP but the store's use TLS
    """

    def __init__(self, seed: int, tls: str | None = None) -> None:
        self._random = random.Random(seed)
        self._certificates = load_certificates(tls)
        self._token = new_token()
        self.events: list[Event] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fuzzed listeners")
        self._thread.start()
        self._call(self._open)
        self._listener = DataListener(tls=self._certificates)
        self._generation = GenerationId(1, 1, 1, "n")
        self._incoming = Incoming(
            self._listener, self._generation, "w0", {"w1": 1}, bytes(32), lambda _: None, lambda _: None
        )
        self._serving = threading.Thread(target=self._incoming.serve, name="fuzzed data listener")
        self._serving.start()

    async def _open(self) -> None:
        # A budget below a second has a port for datagrams.
        config = JobConfig(
            num_proc=1,
            detection_budget_s=0.5,
            takes_agents=True,
            tls=self._certificates.folder if self._certificates else "",
        )
        welcome = Welcome("job", ("true",), "/", {}, 0.5, 1.0, is_elastic=True)
        self._coordinator = Coordinator(
            CoordinatorSetup(config, self._token, "job", welcome=welcome), on_event=self.events.append
        )
        await self._coordinator.start()
        self._outcome = asyncio.create_task(self._coordinator.run())
        self._heard = asyncio.Event()
        self._workers = WorkerServer(lambda *_: self._heard.set(), lambda *_: None)
        self._workers.start()

    def close(self) -> None:
        self._incoming.stop()
        self._serving.join(DEADLINE_S)
        self._call(self._close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()

    async def _close(self) -> None:
        self._workers.stop()
        self._outcome.cancel()
        await asyncio.wait([self._outcome], timeout=DEADLINE_S)

    def fuzz(self, inputs: int) -> None:
        """Send the inputs, a share of them to each port."""
        address = self._coordinator.address
        frames = [frame(each) for each in valid_messages(self._random)]
        introduction = Introduction(self._generation, "w1", "w0", CHANNEL).encode()
        to_worker = DialerHandshake(Purpose.DATA, bytes(32), introduction).begin()
        to_coordinator = DialerHandshake(Purpose.CONTROL, self._token, b"job").begin()
        unix = "\0" + self._workers.address[1:]
        doors: list[tuple[Callable[[], socket.socket], Sequence[bytes]]] = [
            (lambda: _tcp(address), [to_coordinator, *frames]),
            (lambda: _tcp(Address(address.host, self._coordinator.store_port)), self._to_store()),
            (lambda: _unix(unix), frames),
            (lambda: _tcp(self._listener.address), [to_worker, *frames]),
            (lambda: _udp(address), [bytes(48), introduction]),
        ]
        if (certificates := self._certificates) is not None:
            tls = certificates.context(Role.DIALER)
            first_bytes = EncryptedStream(tls, Role.DIALER)
            first_bytes.handshake()
            hello = first_bytes.outgoing()
            doors += [
                (lambda: _tcp(address), [hello]),
                (lambda: _tcp(self._listener.address), [hello]),
                (lambda: tls.wrap_socket(_tcp(address)), [to_coordinator, *frames]),
                (lambda: tls.wrap_socket(_tcp(self._listener.address)), [to_worker, *frames]),
            ]
        kept: list[socket.socket] = []
        for number in range(inputs):
            dial, valid = doors[number % len(doors)]
            data = mutated(self._random.choice(valid), valid, self._random)
            kept.append(sock := dial())
            with contextlib.suppress(OSError):  # hung up on in the middle of it
                for piece in pieces(data, self._random):
                    sock.send(piece)
            while len(kept) > self._random.randrange(100):
                kept.pop(self._random.randrange(len(kept))).close()
        for sock in kept:
            sock.close()

    def check(self) -> None:
        """Be a command, a worker, and a peer of a worker."""
        assert not self._outcome.done(), f"the coordinator has ended: {self._outcome}"
        self._call(self._be_a_command)
        self._call(self._be_a_worker)
        self._be_a_peer()

    async def _be_a_command(self) -> None:
        client = await Client.dial(self._coordinator.address, self._token, "job", self._certificates)
        assert (await client.status()).job == "job"
        client.close()

    async def _be_a_worker(self) -> None:
        self._heard.clear()
        secret = self._workers.expect("w1")
        _, writer = await asyncio.open_unix_connection("\0" + self._workers.address[1:])
        writer.write(frame(encode(Hello("w1", secret, 1, PROTOCOL_VERSION, Address("127.0.0.1", 1)))))
        await self._heard.wait()
        self._workers.dismiss("w1")
        writer.transport.abort()

    def _be_a_peer(self) -> None:
        ours = Introduction(self._generation, "w1", "w0", CHANNEL)
        with selectors.DefaultSelector() as selector:
            dialer = Dialer(selector, self._listener.address, ours, bytes(32), tls=self._certificates)
            deadline_s = now_s() + DEADLINE_S
            while not dialer.is_done:
                assert now_s() < deadline_s, f"the data listener does not serve: {dialer.failure}"
                dialer.run(0.02)
            dialer.take().close()

    def _to_store(self) -> list[bytes]:
        return [HELLO_TO_STORE + each for each in store_requests()]

    def _call(self, function: Callable[[], object]) -> None:
        """Run a coroutine function on the listeners' loop."""

        async def run() -> None:
            async with asyncio.timeout(DEADLINE_S):
                await function()  # type: ignore[misc]

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()


def _tcp(address: Address) -> socket.socket:
    return socket.create_connection((address.host, address.port), DEADLINE_S)


def _unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(DEADLINE_S)
    sock.connect(path)
    return sock


def _udp(address: Address) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.connect((address.host, address.port))
    return sock
