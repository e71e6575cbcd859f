"""Report this worker's status to its agent through a page of shared memory. Worker, collectives and state call it.

Every function may be called anywhere and at any time: in a process that no agent started, nobody reads what it writes.
A call costs well below a microsecond.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from farandole.base.liveness import exit_notice
from farandole.base.liveness.logged_numbers import LoggedNumbers
from farandole.base.machine import now_ns
from farandole.base.membership import Meeting, Phase, WorkerStatus

DUMP_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 7
"""The signal on which a worker writes the stacks of all its threads into its page, whatever it executes. A real-time
signal: no other code uses it, while scripts use SIGUSR1 and SIGUSR2 for checkpoints."""

_numbers = LoggedNumbers()


class OwnStatus:
    """The status of this process, and the page in which it is written: until the agent's is open, or where there is
    none, one that nobody reads."""

    def __init__(self) -> None:
        self.page = OwnStatusPage()
        self.phase = Phase.OUTSIDE
        self.main = threading.main_thread().ident


def open_status_page(path: str, *, gives_exit_notice: bool) -> None:
    """Open the status page, so that the agent sees the status of this worker. Called by the main thread. In another
    thread, or when the page cannot be opened, the status stays unreported, which does the worker no harm. With
    `gives_exit_notice` the agent may learn of this process's death before its memory is freed."""
    if threading.current_thread() is not threading.main_thread():
        return
    OWN.main = threading.get_ident()
    with contextlib.suppress(OSError):
        page = OwnStatusPage(path)
        faulthandler.register(DUMP_SIGNAL, page.descriptor, all_threads=True, chain=False)
        page.enable_dump()
        page.set_phase(OWN.phase)
        OWN.page = page
        if gives_exit_notice and exit_notice.is_supported():
            exit_notice.lock(page.memory, MUTEX_AT)


def set_phase(phase: Phase) -> Phase:
    """Set the phase of the main thread, and return the previous one. Calls of other threads have no effect."""
    before = OWN.phase
    if before != phase and (threading.get_ident() == OWN.main or _is_of_autograd()):
        OWN.phase = phase
        OWN.page.set_phase(phase)
    return before


def waited_ns() -> int:
    """Return for how long the main thread has waited for other workers, in nanoseconds: for differences."""
    return OWN.page.waited_ns


def set_step(generation: int, step: int, epoch: int = 0, trained: int = 0, samples: int = 0) -> None:
    """Set the number of decided steps, and the generation; with a loader also its epoch, and how many of the samples of
    this epoch were trained (`samples` 0: their number is unknown)."""
    OWN.page.set_step(generation, step, epoch, trained, samples)
    _write_numbers()


def log_numbers(numbers: Mapping[str, object]) -> None:
    """Set numbers of the user's, to be shown beside the status: see logged_numbers.py. They are written to the page at
    most twice a second: here, or with the next step. Raises TypeError for what is no number."""
    _numbers.log(numbers)
    _write_numbers()


def _write_numbers() -> None:
    if OWN.page.is_read and _numbers.is_due():
        OWN.page.write_values(_numbers.take())


def set_balance(share: float, speed: float) -> None:
    """Set this worker's part of a global batch, from 0 to 1, and its speed in samples per second, 0 if unknown, where
    local batches follow the speed of the workers."""
    OWN.page.set_balance(share, speed)


def report_progress() -> None:
    """Report progress: a boundary was passed, a batch evaluated."""
    OWN.page.report_progress()


def report_meeting(path: str, has_met: bool) -> None:
    """Report that this worker has met the others, or else that it trains without having met them. For a worker that may
    not have opened its page, because it never calls init(): `path` is that of the page."""
    with contextlib.suppress(OSError):
        page = OwnStatusPage(path)
        page.set_meeting(Meeting.MET if has_met else Meeting.ALONE)
        os.close(page.descriptor)


class InPhase:
    """Set the phase of the main thread within a `with` block, `with InPhase(phase):`, and restore it afterwards."""

    __slots__ = ("_before", "_phase")

    def __init__(self, phase: Phase) -> None:
        self._phase = phase

    def __enter__(self) -> None:
        self._before = set_phase(self._phase)

    def __exit__(self, *_: object) -> None:
        set_phase(self._before)


class WaitingForPeers(InPhase):
    """Mark within a `with` block, `with WaitingForPeers():`, that the main thread waits for other workers."""

    __slots__ = ()

    def __init__(self) -> None:
        self._phase = Phase.WAITING


def _is_of_autograd() -> bool:
    """Return whether this thread was not made by Python. torch computes the gradients of devices in threads of its own,
    for which the main thread waits."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def _forget() -> None:
    OWN.page = OwnStatusPage()


if hasattr(os, "register_at_fork"):  # a loader process must not report for its worker
    os.register_at_fork(after_in_child=_forget)


# A small page of shared memory per worker: the worker stores its status in it, its agent reads it.
#
# The agent makes it (agent/worker_server.py) and reads it; the functions above write it.
#
# The reader needs no cooperation of the worker: the page shows the status of a worker that holds the interpreter's
# lock, waits for a lock for ever, or is stopped. A store takes no lock and no system call. The page has no name in
# any file system, so nothing is left behind; the worker opens it through /proc, as transports do with each other's
# memory.
#
#     0     count        64-bit words, little endian: changes whenever any of the following does
#     8     generation
#     16    step         decided steps
#     24    phase        a Phase
#     32    can dump     whether DUMP_SIGNAL makes the process write the stacks of its threads
#     40    meeting      a Meeting; does not change the count
#     64    a mutex      held by the main thread for as long as it lives (liveness/exit_notice.py)
#     256   measurements, which do not change the count: words as above
#           times        two: when the newest step was set, and for how long the main thread has waited for others, in
#                        nanoseconds of the machine's monotonic clock
#           epoch        epoch, trained samples of it, all samples of it
#           balance      the worker's part of a global batch, in millionths, and its speed, in samples for each 1000 s
#           values       odd while the user's numbers are being written; their bytes
#     336   numbers of the user's, MessagePack of a dictionary
#     4096  stacks       texts, one dump after the other: the worker's descriptor stands behind the last one, since its
#                        position is the worker's own. The agent remembers where the newest one begins, and frees the
#                        memory of those before it


STACKS_AT = 4096
PAGE_BYTES = STACKS_AT + (8 << 20)
"""The size of a page: hundreds of dumps. It costs address space; the system has memory for what was written."""

_LEAST_ROOM = 1 << 18  # for a dump to begin: faulthandler writes at most 100 threads of 100 frames
MUTEX_AT = 64
_WORDS = 6
_COUNT, _GENERATION, _STEP, _PHASE, _CAN_DUMP, _MEETING = range(_WORDS)

_MEASURED_AT, _VALUES_AT = 256, 336
_MEASURED_WORDS = 9
_STEP_NS, _WAITED_NS, _EPOCH, _TRAINED, _SAMPLES, _SHARE, _SPEED, _VALUES_VERSION, _VALUES_BYTES = range(
    _MEASURED_WORDS
)
_VALUES_DECODER = msgspec.msgpack.Decoder(dict[str, float])


class Measured(NamedTuple):
    """The measurements on a page: counters, of which the agent takes differences."""

    generation: int
    step: int
    step_ns: int
    waited_ns: int
    epoch: int
    trained: int
    samples: int
    share_millionths: int
    samples_per_1000_s: int


class StatusPage:
    """The agent's end. Raises OSError when there is no memory for it, or the system does not support it."""

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise OSError("pages for workers are made with Linux's memfd")
        self._descriptor = os.memfd_create("farandole-worker", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, PAGE_BYTES)
            import fcntl  # not on every system

            # A worker that made it shorter would crash the agent.
            fcntl.fcntl(self._descriptor, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW)
            self.memory = mmap.mmap(self._descriptor, PAGE_BYTES)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._words = memoryview(self.memory)[: 8 * _WORDS].cast("q")
        self._measured = _measured_words(self.memory)
        self._values_version, self._values = 0, dict[str, float]()
        self._dump_at = STACKS_AT

    @property
    def path(self) -> str:
        """The path by which the worker opens and identifies it: its descriptor may refer to another file later."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}#{os.fstat(self._descriptor).st_ino}"

    @property
    def can_dump(self) -> bool:
        """True when DUMP_SIGNAL may be sent; it would end a process without a handler for it."""
        return self._words[_CAN_DUMP] == 1

    def look(self) -> WorkerStatus | None:
        """Return the worker's status; None before it has stored one, or when it has stored invalid values."""
        count, generation, step, phase, *_ = self._words
        try:
            return WorkerStatus(count, generation, step, Phase(phase)) if count else None
        except ValueError:
            return None

    def measured(self) -> Measured:
        """Return the measurements. A store between two of these reads makes one of them newer than the others."""
        measured, words = self._measured, self._words
        return Measured(words[_GENERATION], words[_STEP], *measured[: _SPEED + 1])

    def values(self) -> dict[str, float]:
        """Return the user's numbers, as they were last written whole. What a worker writes is not trusted."""
        measured = self._measured
        version, length = measured[_VALUES_VERSION], measured[_VALUES_BYTES]
        if version != self._values_version and version % 2 == 0 and 0 <= length <= STACKS_AT - _VALUES_AT:
            data = self.memory[_VALUES_AT : _VALUES_AT + length]
            if measured[_VALUES_VERSION] == version:
                with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                    self._values = _VALUES_DECODER.decode(data)
                self._values_version = version
        return self._values

    def meeting(self) -> Meeting:
        """Return whether the worker has met the others, as far as it has reported that."""
        try:
            return Meeting(self._words[_MEETING])
        except ValueError:
            return Meeting.UNKNOWN

    def begin_dump(self) -> bool:
        """Forget the stacks that the worker has written: those of the next dump are wanted. Return whether there is
        room for it."""
        before, self._dump_at = self._dump_at, self._end_of_text()
        first, last = _page_boundary(before), _page_boundary(self._dump_at)
        if last > first:
            with contextlib.suppress(OSError):  # they cost memory, and nothing else
                self.memory.madvise(mmap.MADV_REMOVE, first, last - first)
        return PAGE_BYTES - self._dump_at >= _LEAST_ROOM

    def stacks(self) -> str:
        """Return the stacks of the worker's threads that it has written since begin_dump(); empty if there are none
        yet."""
        return self.memory[self._dump_at : self._end_of_text()].decode("utf-8", "backslashreplace")

    def _end_of_text(self) -> int:
        end = self.memory.find(b"\0", self._dump_at)
        return PAGE_BYTES if end < 0 else end

    def close(self) -> None:
        """Close the descriptor, so that no other process can open the page. The memory is freed with its last view."""
        os.close(self._descriptor)


class OwnStatusPage:
    """The worker's end; without a path, one that nobody reads. Raises OSError when it cannot be opened, or does not
    exist any more."""

    def __init__(self, path: str = "") -> None:
        self.is_read = bool(path)
        self.descriptor = -1
        """A descriptor in the area for stacks: data written to it is stored there, one text behind the other."""
        if path:
            file, _, inode = path.partition("#")
            self.descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
            if str(os.fstat(self.descriptor).st_ino) != inode:
                os.close(self.descriptor)
                raise FileNotFoundError(f"{file} is another file than the page that was there")
            os.lseek(self.descriptor, STACKS_AT, os.SEEK_SET)
        self.memory = mmap.mmap(self.descriptor, STACKS_AT)  # of -1: anonymous memory
        self._words = memoryview(self.memory)[: 8 * _WORDS].cast("q")
        self._measured = _measured_words(self.memory)
        self._waits_since_ns = 0  # 0: the main thread does not wait

    def set_phase(self, phase: int) -> None:
        words = self._words
        words[_PHASE] = phase
        words[_COUNT] += 1
        if phase == Phase.WAITING:
            self._waits_since_ns = now_ns()
        elif self._waits_since_ns:
            self._measured[_WAITED_NS] += now_ns() - self._waits_since_ns
            self._waits_since_ns = 0

    @property
    def waited_ns(self) -> int:
        """For how long the main thread has waited for other workers."""
        return self._measured[_WAITED_NS]

    def set_balance(self, share: float, speed: float) -> None:
        measured = self._measured
        measured[_SHARE], measured[_SPEED] = round(1e6 * share), round(1e3 * speed)

    def set_step(self, generation: int, step: int, epoch: int = 0, trained: int = 0, samples: int = 0) -> None:
        words, measured = self._words, self._measured
        measured[_STEP_NS] = now_ns()
        measured[_EPOCH], measured[_TRAINED], measured[_SAMPLES] = epoch, trained, samples
        words[_GENERATION], words[_STEP] = generation, step
        words[_COUNT] += 1

    def write_values(self, values: Mapping[str, float]) -> None:
        """Write the user's numbers: as many of them, from the first on, as there is room for."""
        data = msgspec.msgpack.encode(values)
        while len(data) > STACKS_AT - _VALUES_AT:
            values = dict(list(values.items())[: len(values) // 2])
            data = msgspec.msgpack.encode(values)
        measured = self._measured
        measured[_VALUES_VERSION] += 1
        measured[_VALUES_BYTES] = len(data)
        self.memory[_VALUES_AT : _VALUES_AT + len(data)] = data
        measured[_VALUES_VERSION] += 1

    def report_progress(self) -> None:
        self._words[_COUNT] += 1

    def set_meeting(self, meeting: int) -> None:
        self._words[_MEETING] = meeting

    def enable_dump(self) -> None:
        self._words[_CAN_DUMP] = 1


def _page_boundary(offset: int) -> int:
    """Return the last boundary of a page of memory that is not behind the offset."""
    return offset - offset % mmap.PAGESIZE


def _measured_words(memory: mmap.mmap) -> memoryview[int]:
    return memoryview(memory)[_MEASURED_AT : _MEASURED_AT + 8 * _MEASURED_WORDS].cast("q")


_ADD_SEALS = 1033
_SEAL_SHRINK, _SEAL_GROW = 0x0002, 0x0004

OWN = OwnStatus()
