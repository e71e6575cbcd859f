"""Which objects an ABORT reaches, when it comes before, during and after their registration."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from farandole.errors import GenerationEnded
from farandole.training.worker.worker_recovery import AbortRegistry

ROUNDS = 300
DEADLINE_S = 10.0


class Transport:
    """A transport that keeps what it was told; the first reason counts, as with all transports."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.is_closed = False

    def abort(self, reason: str) -> None:
        self.reasons.append(reason)

    def close(self) -> None:
        self.is_closed = True


class Blocked(Transport):
    """A transport in whose call a thread is blocked until the abort."""

    def __init__(self) -> None:
        super().__init__()
        self._ended = threading.Event()

    def abort(self, reason: str) -> None:
        super().abort(reason)
        self._ended.set()

    def wait(self) -> bool:
        return self._ended.wait(DEADLINE_S)


def registered(registry: AbortRegistry, number: int, **how: bool) -> Transport:
    transport = Transport()
    registry.register(number, transport, **how)
    return transport


def test_an_abort_reaches_all_objects_of_older_generations_and_no_others() -> None:
    registry = AbortRegistry()
    by_number = {number: registered(registry, number) for number in (1, 2, 3)}
    registry.abort_below(3, "w2 was lost")
    assert [by_number[number].reasons for number in (1, 2, 3)] == [["w2 was lost"], ["w2 was lost"], []]


def test_an_object_that_is_registered_after_the_abort_is_aborted_at_once() -> None:
    registry, late = AbortRegistry(), Transport()
    registry.abort_below(3, "w2 was lost")
    with pytest.raises(GenerationEnded, match="w2 was lost") as raised:
        registry.register(2, late)
    assert late.reasons == ["w2 was lost"]
    assert raised.value.generation == 2
    assert not registered(registry, 3).reasons


def test_an_object_that_came_too_late_is_closed_with_its_generation_all_the_same() -> None:
    registry, late = AbortRegistry(), Transport()
    registry.abort_below(3, "w2 was lost")
    with pytest.raises(GenerationEnded):
        registry.register(2, late)
    registry.close_all_but(3)
    assert late.is_closed


def test_an_abort_for_an_older_generation_does_not_take_back_a_newer_one() -> None:
    registry, late = AbortRegistry(), Transport()
    registry.abort_below(5, "new")
    registry.abort_below(3, "old")
    with pytest.raises(GenerationEnded, match="new"):
        registry.register(4, late)


def test_the_end_of_the_job_reaches_every_generation_and_all_later_objects() -> None:
    registry, late = AbortRegistry(), Transport()
    by_number = [registered(registry, number) for number in (1, 7)]
    registry.abort_all("the job is over")
    assert [each.reasons for each in by_number] == [["the job is over"]] * 2
    with pytest.raises(GenerationEnded, match="the job is over"):
        registry.register(8, late)


def test_a_transport_replaces_its_builder() -> None:
    registry, transport = AbortRegistry(), Transport()
    builder = registered(registry, 1, is_builder=True)
    registry.register(1, transport, replaces=builder)
    assert registry.newest() == (1, [transport])
    registry.abort_below(2, "w2 was lost")
    assert (builder.reasons, transport.reasons) == ([], ["w2 was lost"])


def test_the_newest_generation_is_the_one_with_the_highest_number() -> None:
    registry = AbortRegistry()
    assert registry.newest() == (0, [])
    new, _ = registered(registry, 3), registered(registry, 2)
    assert registry.newest() == (3, [new])


def test_closing_keeps_one_generation_and_forgets_the_others() -> None:
    registry = AbortRegistry()
    old, new = registered(registry, 1), registered(registry, 2)
    registry.close_all_but(2)
    assert (old.is_closed, new.is_closed) == (True, False)
    registry.abort_below(9, "later")
    assert (old.reasons, new.reasons) == ([], ["later"])
    registry.close_all()
    assert new.is_closed
    assert registry.newest() == (0, [])


def test_the_world_of_an_entered_generation_alone_holds_its_transports() -> None:
    """A process set that is removed is gone: nothing keeps its connections."""
    registry = AbortRegistry()
    before = registered(registry, 1)
    registry.enter(1)
    after = registered(registry, 1)
    gone = [weakref.ref(before), weakref.ref(after)]
    assert registry.newest() == (1, [before, after])
    del before, after
    gc.collect()
    assert [each() for each in gone] == [None, None]
    assert registry.newest() == (1, [])


def test_a_world_that_was_never_completed_is_held_until_it_is_closed() -> None:
    registry = AbortRegistry()
    gone = weakref.ref(registered(registry, 1))
    gc.collect()
    assert gone() is not None
    registry.close_all_but(2)
    gc.collect()
    assert gone() is None


def test_a_builder_that_fails_in_an_entered_generation_can_still_be_asked() -> None:
    registry = AbortRegistry()
    registry.enter(1)
    gone = weakref.ref(registered(registry, 1, is_builder=True))
    registered(registry, 1)
    gc.collect()
    assert registry.newest() == (1, [gone()])


def test_an_object_registered_during_an_abort_is_aborted_by_either_thread() -> None:
    """The main thread registers and blocks while the link's thread aborts: no schedule leaves it blocked."""
    for _ in range(ROUNDS):
        registry, start = AbortRegistry(), threading.Barrier(2)
        blocked = [Blocked() for _ in range(4)]
        ended: list[bool] = []

        def connect_and_wait(
            registry: AbortRegistry = registry,
            start: threading.Barrier = start,
            blocked: list[Blocked] = blocked,
            ended: list[bool] = ended,
        ) -> None:
            start.wait(DEADLINE_S)
            for each in blocked:
                try:
                    registry.register(1, each)
                except GenerationEnded:
                    ended.append(each.reasons != [])
                    return
            ended.append(all(each.wait() for each in blocked))

        thread = threading.Thread(target=connect_and_wait)
        thread.start()
        start.wait(DEADLINE_S)
        registry.abort_below(2, "w2 was lost")
        thread.join(DEADLINE_S)
        assert ended == [True]


def test_an_abort_waits_for_no_object_that_is_being_closed() -> None:
    """Closing may take long: a thread has to be joined, or a peer to read the rest."""
    registry, blocked = AbortRegistry(), Blocked()
    has_begun, may_end = threading.Event(), threading.Event()

    class Slow(Transport):
        def close(self) -> None:
            has_begun.set()
            may_end.wait(DEADLINE_S)

    registry.register(1, Slow())
    registry.register(2, blocked)
    closing = threading.Thread(target=registry.close_all_but, args=(2,))
    closing.start()
    assert has_begun.wait(DEADLINE_S)
    registry.abort_below(3, "w2 was lost")
    assert blocked.reasons == ["w2 was lost"]
    may_end.set()
    closing.join(DEADLINE_S)


def test_an_abort_that_aborts_another_object_by_itself_finds_the_registry_free() -> None:
    """A transport's abort may end a thread that registers in turn."""
    registry, late, ended = AbortRegistry(), Transport(), threading.Event()

    def register_late() -> None:
        with pytest.raises(GenerationEnded):
            registry.register(1, late)
        ended.set()

    class Waking(Transport):
        def abort(self, reason: str) -> None:
            threading.Thread(target=register_late).start()
            assert ended.wait(DEADLINE_S)

    registry.register(1, Waking())
    registry.abort_below(2, "w2 was lost")
    assert late.reasons == ["w2 was lost"]
