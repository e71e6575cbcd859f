"""Ranks that negotiate with each other in one thread, each with its own copy, and what must hold of every round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from farandole.collectives.named.negotiation import Negotiation
from farandole.collectives.named.operation_requests import (
    GLOBAL_SET,
    AllJoined,
    Decision,
    Execute,
    Fail,
    Key,
    Kind,
    Request,
    RoundPayload,
    SetAdded,
    SetRemoved,
)
from farandole.collectives.transport import Reduction


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
        self.payloads: list[RoundPayload] = []
        self._removed: list[int] = []
        self.ended: list[list[tuple[Key, Decision]]] = [[] for _ in range(size)]

    def round(self, *submitted: Sequence[Request], expired: Iterable[Key] = ()) -> list[Decision]:
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
        payloads = [each.make_payload(rank, every[rank], expired) for rank, each in enumerate(self.negotiations)]
        self.payloads = msgspec.msgpack.decode(msgspec.msgpack.encode(payloads), type=list[RoundPayload])
        for rank, negotiation in enumerate(self.negotiations):
            requested = [key for who, key in negotiation.requested(self.payloads) if who == rank]
            assert sorted(map(str, requested)) == sorted(str(each.key) for each in every[rank])
        decided = [each.round(self.payloads) for each in self.negotiations]
        assert all(each == decided[0] for each in decided)
        for decision in decided[0]:
            self._check(decision)
        waiting = [each.waiting() for each in self.negotiations]
        assert all(each == waiting[0] for each in waiting)
        self._check_waiting()
        return decided[0]

    def everybody(self, *requests: Request) -> list[Decision]:
        """A round in which all ranks submit this."""
        return self.round(*[requests] * self.size)

    def is_quiet(self) -> bool:
        """Whether nothing waits, for anybody."""
        return not any(self.in_flight) and not self.negotiations[0].waiting()

    # Checks ------------------------------------------------------------------------------------------------

    def _check(self, decision: Decision) -> None:
        match decision:
            case Execute(operations):
                self._check_fusion(decision)
                for agreed in operations:
                    assert agreed.ranks == self.sets[agreed.key.process_set]
                    joined = self.joined.get(agreed.key.process_set, ())
                    parts = [self.in_flight[rank].get(agreed.key) for rank in agreed.ranks]
                    assert list(agreed.parts) == parts
                    assert any(parts)
                    assert all(part or rank in joined for rank, part in zip(agreed.ranks, parts, strict=True))
                    if not all(parts):
                        assert agreed.key.kind in (Kind.ALLREDUCE, Kind.BARRIER)
                    present = [part for part in parts if part]
                    assert (
                        len({(part.dtype, part.op, part.prescale, part.postscale, part.root) for part in present}) == 1
                    )
                    self._end(agreed.key, decision)
            case Fail(key, message):
                assert message
                assert any(key in mine for mine in self.in_flight), f"{key} fails, and nobody waits for it"
                self._end(key, decision)
            case AllJoined(number, last_rank):
                assert sorted(self.joined[number]) == list(self.sets[number])
                assert self.joined.pop(number)[-1] == last_rank
                for rank in self.sets[number]:
                    here = [key for key in self.in_flight[rank] if key.process_set == number]
                    mine = [
                        key for key in here if key.kind < Kind.ADD_PROCESS_SET
                    ]  # Sets change at the end of a round.
                    assert [key.kind for key in mine] == [Kind.JOIN]
                    self.ended[rank].append((mine[0], decision))
                    del self.in_flight[rank][mine[0]]
            case SetAdded(key, number, ranks):
                assert number == max([*self.sets, *self._removed]) + 1
                assert ranks not in self.sets.values()
                self.sets[number] = ranks
                self._end(key, decision)
            case SetRemoved(key, number):
                self._removed.append(number)
                del self.sets[number]
                self.joined.pop(number, None)
                assert not any(each.process_set == number for mine in self.in_flight for each in mine)
                self._end(key, decision)

    def _end(self, key: Key, decision: Decision) -> None:
        for rank, mine in enumerate(self.in_flight):
            if mine.pop(key, None) is not None:
                self.ended[rank].append((key, decision))

    def _check_fusion(self, execute: Execute) -> None:
        parts = [agreed.any_part for agreed in execute.operations]
        if len(parts) == 1:
            return
        assert {part.key.kind for part in parts} == {Kind.ALLREDUCE}
        assert len({(part.dtype, part.op, part.prescale, part.key.process_set, part.group) for part in parts}) <= len(
            {part.group for part in parts}
        )
        assert all(part.op != Reduction.ADASUM for part in parts)
        if not parts[0].group:
            assert sum(part.shape[0] * part.shape[1] * 4 for part in parts) <= self.fusion_bytes

    def _check_waiting(self) -> None:
        for each in self.negotiations[0].waiting():
            assert each.missing, f"{each.key} waits for nobody"
            has = {rank for rank, mine in enumerate(self.in_flight) if each.key in mine}
            assert has == set(each.submitted_by)
