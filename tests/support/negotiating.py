"""Ranks that negotiate with each other in one thread, each with its own copy, and what must hold of every round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from farandole.integrations.horovod.named.negotiation import Negotiation
from farandole.integrations.horovod.named.stages import (
    GLOBAL_SET,
    AllJoined,
    Execute,
    Fail,
    Key,
    Kind,
    Request,
    RequestList,
    Response,
    SetAdded,
    SetRemoved,
)
from farandole.training.collectives.transport import Reduction


def allreduce(name: str = "x", **more: object) -> Request:
    return request(Kind.ALLREDUCE, name, **more)


def request(kind: Kind, name: str = "x", process_set: int = GLOBAL_SET, **more: object) -> Request:
    """A request of a small tensor, as the public functions make it."""
    prefix = "grouped_" if more.get("group") else ""
    has_tensor = kind <= Kind.REDUCESCATTER
    fields: dict[str, object] = {"dtype": "float32", "shape": (60, 2)} if has_tensor else {}
    key = Key(process_set, kind, f"{prefix}{kind.name.lower()}.{name}")
    return Request(key, **(fields | more))  # type: ignore[arg-type]


def group(kind: Kind, name: str, count: int, **more: object) -> list[Request]:
    """The requests of one grouped call."""
    label = f"grouped_{kind.name.lower()}.{name}"
    names = [f"{name}_{part + 1}of{count}" for part in range(count)]
    return [request(kind, each, group=label, group_size=count, **more) for each in names]


class Ranks:
    """All ranks of a world. After each round it is checked that they decide alike, that nothing is carried out that
    some member has not submitted, and that what ends was in flight."""

    def __init__(self, size: int, cache_capacity: int = 1024, fusion_bytes: int = 64 << 20) -> None:
        self.size, self.fusion_bytes = size, fusion_bytes
        self.negotiations = [Negotiation(size, cache_capacity, fusion_bytes) for _ in range(size)]
        self.in_flight: list[dict[Key, Request]] = [{} for _ in range(size)]
        self.sets: dict[int, tuple[int, ...]] = {GLOBAL_SET: tuple(range(size))}
        self.joined: dict[int, list[int]] = {}
        self.request_lists: list[RequestList] = []
        self._removed: list[int] = []
        self.ended: list[list[tuple[Key, Response]]] = [[] for _ in range(size)]

    def round(self, *submitted: Sequence[Request], expired: Iterable[Key] = ()) -> list[Response]:
        """One round; what each rank submits, by rank, and nothing from those that are left out."""
        every = [*submitted, *[()] * (self.size - len(submitted))]
        joins: list[tuple[int, int]] = []
        for rank, requests in enumerate(every):
            for each in requests:
                assert each.key not in self.in_flight[rank], "a test must not submit what is in flight"
                self.in_flight[rank][each.key] = each
                if each.key.kind is Kind.JOIN:
                    joins.append((each.key.process_set, rank))
        for number, rank in joins:
            self.joined.setdefault(number, []).append(rank)
        request_lists = [each.request_list(rank, every[rank], expired) for rank, each in enumerate(self.negotiations)]
        self.request_lists = msgspec.msgpack.decode(msgspec.msgpack.encode(request_lists), type=list[RequestList])
        for rank, negotiation in enumerate(self.negotiations):
            requested = [key for who, key in negotiation.requested(self.request_lists) if who == rank]
            assert sorted(map(str, requested)) == sorted(str(each.key) for each in every[rank])
        decided = [each.round(self.request_lists) for each in self.negotiations]
        assert all(each == decided[0] for each in decided)
        for response in decided[0]:
            self._check(response)
        waiting = [each.waiting() for each in self.negotiations]
        assert all(each == waiting[0] for each in waiting)
        self._check_waiting()
        return decided[0]

    def everybody(self, *requests: Request) -> list[Response]:
        """A round in which all ranks submit this."""
        return self.round(*[requests] * self.size)

    def is_quiet(self) -> bool:
        """Whether nothing waits, for anybody."""
        return not any(self.in_flight) and not self.negotiations[0].waiting()

    # Checks ------------------------------------------------------------------------------------------------

    def _check(self, response: Response) -> None:
        match response:
            case Execute(operations):
                self._check_fusion(response)
                for operation in operations:
                    assert operation.ranks == self.sets[operation.key.process_set]
                    joined = self.joined.get(operation.key.process_set, ())
                    requests = [self.in_flight[rank].get(operation.key) for rank in operation.ranks]
                    assert list(operation.requests) == requests
                    assert any(requests)
                    assert all(each or rank in joined for rank, each in zip(operation.ranks, requests, strict=True))
                    if not all(requests):
                        assert operation.key.kind in (Kind.ALLREDUCE, Kind.BARRIER)
                    present = [each for each in requests if each]
                    assert (
                        len({(each.dtype, each.op, each.prescale, each.postscale, each.root) for each in present}) == 1
                    )
                    self._end(operation.key, response)
            case Fail(key, message):
                assert message
                assert any(key in mine for mine in self.in_flight), f"{key} fails, and nobody waits for it"
                self._end(key, response)
            case AllJoined(number, last_rank):
                assert sorted(self.joined[number]) == list(self.sets[number])
                assert self.joined.pop(number)[-1] == last_rank
                for rank in self.sets[number]:
                    here = [key for key in self.in_flight[rank] if key.process_set == number]
                    mine = [
                        key for key in here if key.kind < Kind.ADD_PROCESS_SET
                    ]  # Sets change at the end of a round.
                    assert [key.kind for key in mine] == [Kind.JOIN]
                    self.ended[rank].append((mine[0], response))
                    del self.in_flight[rank][mine[0]]
            case SetAdded(key, number, ranks):
                assert number == max([*self.sets, *self._removed]) + 1
                assert ranks not in self.sets.values()
                self.sets[number] = ranks
                self._end(key, response)
            case SetRemoved(key, number):
                self._removed.append(number)
                del self.sets[number]
                self.joined.pop(number, None)
                assert not any(each.process_set == number for mine in self.in_flight for each in mine)
                self._end(key, response)

    def _end(self, key: Key, response: Response) -> None:
        for rank, mine in enumerate(self.in_flight):
            if mine.pop(key, None) is not None:
                self.ended[rank].append((key, response))

    def _check_fusion(self, execute: Execute) -> None:
        requests = [operation.any_request for operation in execute.operations]
        if len(requests) == 1:
            return
        assert {each.key.kind for each in requests} == {Kind.ALLREDUCE}
        alike = {(each.dtype, each.op, each.prescale, each.key.process_set, each.group) for each in requests}
        assert len(alike) <= len({each.group for each in requests})
        assert all(each.op != Reduction.ADASUM for each in requests)
        if not requests[0].group:
            assert sum(each.shape[0] * each.shape[1] * 4 for each in requests) <= self.fusion_bytes

    def _check_waiting(self) -> None:
        for each in self.negotiations[0].waiting():
            assert each.missing, f"{each.key} waits for nobody"
            has = {rank for rank, mine in enumerate(self.in_flight) if each.key in mine}
            assert has == set(each.submitted_by)
