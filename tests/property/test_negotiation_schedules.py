"""Named operations under random schedules: whatever order and rounds ranks submit in, all decide the same, nothing
is carried out too early, nothing is decided twice, and nobody waits for ever. tests/support/negotiating.py checks each
round.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Sequence

import msgspec
from hypothesis import given, settings, strategies as st

from farandole.integrations.horovod.named.stages import AllJoined, Execute, Fail, Key, Kind, Request
from farandole.training.collectives.transport import Reduction
from tests.support.negotiating import Ranks, allreduce, group, request

many = settings(deadline=None, max_examples=250)  # a busy machine is not a failure
dice_rolls = st.integers(0, 2**64 - 1).map(random.Random)
KINDS = (Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.REDUCESCATTER)
Unit = list[Request]  # what one call submits: one operation, or a group


def some_ranks(dice: random.Random, smallest: int = 1) -> Ranks:
    size = dice.randint(smallest, 5)
    return Ranks(size, dice.choice([0, 1, 2, 3, 5, 100]), dice.choice([0, 48, 100, 1 << 20]))


def random_call(dice: random.Random, name: str, process_set: int, members: Sequence[int]) -> Unit:
    kind = dice.choice(KINDS + (Kind.ALLREDUCE,) * 4)
    more: dict[str, object] = {"process_set": process_set, "dtype": dice.choice(["float32", "int64"])}
    if kind is Kind.BROADCAST:
        more["root"] = dice.choice(members)
    if kind is Kind.ALLREDUCE:
        more["op"] = int(dice.choice([Reduction.SUM, Reduction.SUM, Reduction.AVERAGE, Reduction.ADASUM]))
    more["shape"] = (60 * dice.randint(0, 2), dice.randint(1, 2))
    if kind in (Kind.ALLREDUCE, Kind.ALLGATHER, Kind.REDUCESCATTER) and dice.random() < 0.2:
        return group(kind, name, dice.randint(1, 3), **more)
    return [request(kind, name, **more)]


def shuffled(dice: random.Random, units: Sequence[Unit]) -> list[Unit]:
    return dice.sample(list(units), len(units))


def play(dice: random.Random, ranks: Ranks, queues: Sequence[deque[Unit]], atomic: bool = True) -> None:
    """Submit everything, each rank in its own order and at its own pace, and then let the dust settle.

    A rank waits with a name that it has in flight, as the engine makes it do. atomic: whole groups in one round
    """
    patience = 0
    while any(queues) and patience < 50:
        submitted: list[list[Request]] = []
        for rank, queue in enumerate(queues):
            now: list[Request] = []
            for _ in range(dice.randint(0, 4)):
                taken = set(ranks.in_flight[rank]) | {each.key for each in now}
                if not queue or any(each.key in taken for each in queue[0]):
                    break
                if any(each.key.kind is Kind.JOIN for each in queue[0]) and len(queue) > 1:
                    break
                unit = queue.popleft()
                if not atomic and len(unit) > 1 and dice.random() < 0.5:
                    queue.appendleft(unit[1:])
                    unit = unit[:1]
                now += unit
            submitted.append(now)
        patience = 0 if any(submitted) else patience + 1
        ranks.round(*submitted)
    ranks.round()


def tally(ranks: Ranks, rank: int, kind: type) -> Counter[Key]:
    return Counter(key for key, decision in ranks.ended[rank] if isinstance(decision, kind))


# What fits ---------------------------------------------------------------------------------------------------


@many
@given(dice_rolls)
def test_what_all_members_submit_is_carried_out_exactly_once(dice: random.Random) -> None:
    ranks = some_ranks(dice)
    add_sets(dice, ranks)
    sets = list(ranks.sets.items())
    step = [random_call(dice, f"n{place}", *dice.choice(sets)) for place in range(dice.randint(1, 8))]
    expected: list[Counter[Key]] = [Counter() for _ in range(ranks.size)]
    for _ in range(dice.randint(1, 6)):
        if dice.random() < 0.3:  # Some operation changes; the cache must notice.
            place = dice.randrange(len(step))
            step[place] = random_call(dice, f"n{place}", *dice.choice(sets))
        mine = [[unit for unit in step if rank in ranks.sets[unit[0].key.process_set]] for rank in range(ranks.size)]
        for rank, units in enumerate(mine):
            expected[rank].update(each.key for unit in units for each in unit)
        # As in training: whoever is through with a step waits for its results before the next one.
        play(dice, ranks, [deque(shuffled(dice, units)) for units in mine], atomic=dice.random() < 0.7)
    assert ranks.is_quiet()
    for rank in range(ranks.size):
        assert tally(ranks, rank, Execute) == expected[rank]
        assert not tally(ranks, rank, Fail)


def add_sets(dice: random.Random, ranks: Ranks) -> None:
    for number in range(dice.randint(0, 3)):
        members = tuple(sorted(dice.sample(range(ranks.size), dice.randint(1, ranks.size))))
        if members not in ranks.sets.values():
            submit = request(Kind.ADD_PROCESS_SET, str(number), ranks=members)
            ranks.everybody(submit)


@many
@given(dice_rolls)
def test_ranks_that_run_ahead_of_each_other_meet_by_name(dice: random.Random) -> None:
    """Without waiting for results: the next operation of a name comes as soon as the name is free."""
    ranks = some_ranks(dice)
    step = [[allreduce(f"n{place}")] for place in range(dice.randint(1, 6))]
    order = [unit for _ in range(dice.randint(1, 8)) for unit in step]
    queues = [deque(order) for _ in range(ranks.size)]
    play(dice, ranks, queues)
    assert ranks.is_quiet()
    for rank in range(ranks.size):
        assert sum(tally(ranks, rank, Execute).values()) == len(order)


# What does not fit -------------------------------------------------------------------------------------------


CHANGES: tuple[dict[str, object], ...] = (
    {"dtype": "float64"},
    {"shape": (60, 7)},
    {"shape": (60,)},
    {"device": 0},
    {"op": int(Reduction.MAX)},
    {"postscale": 2.0},
)


def changed(dice: random.Random, each: Request) -> Request:
    """The same operation, said so that it does not fit."""
    possible = CHANGES if each.key.kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER) else CHANGES[:4]
    if each.key.kind is Kind.BROADCAST:
        possible = ({"root": 0 if each.root else 1}, *possible)
    return msgspec.structs.replace(each, **dice.choice(possible))


@many
@given(dice_rolls)
def test_a_mismatch_fails_on_all_and_harms_nothing_else(dice: random.Random) -> None:
    ranks = some_ranks(dice, smallest=2)
    names = [f"n{place}" for place in range(dice.randint(1, 6))]
    for _ in range(dice.randint(1, 4)):
        step = [random_call(dice, name, *next(iter(ranks.sets.items()))) for name in names]
        mine: list[list[Unit]] = [list(step) for _ in range(ranks.size)]
        bad = dice.sample(range(len(step)), dice.randint(0, min(2, len(step))))
        for place in bad:
            liar, part = dice.randrange(ranks.size), dice.randrange(len(step[place]))
            unit = list(step[place])
            unit[part] = changed(dice, unit[part])
            mine[liar][place] = unit
        before = [len(ended) for ended in ranks.ended]
        play(dice, ranks, [deque(shuffled(dice, units)) for units in mine], atomic=dice.random() < 0.7)
        assert ranks.is_quiet()
        expected = {each.key: Fail if place in bad else Execute for place, unit in enumerate(step) for each in unit}
        for rank in range(ranks.size):
            got = ranks.ended[rank][before[rank] :]
            assert {key: type(decision) for key, decision in got} == expected
            assert len(got) == len(expected)


@many
@given(dice_rolls)
def test_ranks_that_do_different_things_under_one_name_never_hang(dice: random.Random) -> None:
    """Another kind, another group, another size of a group: all get an answer, and groups one answer for all."""
    ranks = some_ranks(dice, smallest=2)
    kinds, group_kinds = dice.sample(KINDS, 2), (Kind.ALLREDUCE, Kind.ALLGATHER)
    sizes = dice.choice([[1, 2, 3], [2]])
    meanings: list[Unit] = [[request(kind, "a")] for kind in kinds[: dice.randint(1, 2)]]
    if dice.random() < 0.7:
        meanings = [group(dice.choice(group_kinds), "a", dice.choice(sizes)) for _ in range(dice.randint(1, 3))]
        if sizes == [2]:
            meanings.append([request(dice.choice(KINDS), dice.choice(["a", "a_1of2"]))])
    mine = [dice.choice(meanings) for _ in range(ranks.size)]
    play(dice, ranks, [deque([unit]) for unit in mine], atomic=dice.random() < 0.7)
    assert ranks.is_quiet()
    fits = all(unit == mine[0] for unit in mine)
    for rank, unit in enumerate(mine):
        assert Counter(key for key, _ in ranks.ended[rank]) == Counter(each.key for each in unit)
        assert {type(decision) for _, decision in ranks.ended[rank]} == {Execute if fits else Fail}


@many
@given(dice_rolls)
def test_any_nonsense_is_decided_alike(dice: random.Random) -> None:
    """Random submissions of few names, kinds, groups and sets, joins and give-ups: the checks of each round hold."""
    ranks = some_ranks(dice)
    add_sets(dice, ranks)
    for step in range(dice.randint(1, 25)):
        submitted: list[list[Request]] = []
        for rank in range(ranks.size):
            now: dict[Key, Request] = {}
            for _ in range(dice.randint(0, 3)):
                each = nonsense(dice, ranks, step)
                is_joined = each.key.kind is Kind.JOIN and (
                    any(key.kind is Kind.JOIN for key in [*ranks.in_flight[rank], *now])
                    or rank not in ranks.sets.get(each.key.process_set, ())
                )
                if each.key not in ranks.in_flight[rank] and not is_joined:
                    now.setdefault(each.key, each)
            submitted.append(list(now.values()))
        keys = [key for mine in ranks.in_flight for key in mine]
        expired = dice.sample(keys, 1) if keys and dice.random() < 0.1 else []
        ranks.round(*submitted, expired=expired)
    keys = [each.key for each in ranks.negotiations[0].waiting()]
    ranks.round(expired=keys)
    assert not ranks.negotiations[0].waiting()


def nonsense(dice: random.Random, ranks: Ranks, step: int) -> Request:
    what = dice.random()
    number = dice.choice(list(ranks.sets)) if dice.random() < 0.97 else 9
    if what < 0.05:
        return request(Kind.JOIN, "join", process_set=number)
    if what < 0.1:
        members = tuple(sorted(dice.sample(range(ranks.size), dice.randint(1, ranks.size))))
        kind = dice.choice([Kind.ADD_PROCESS_SET, Kind.REMOVE_PROCESS_SET])
        return request(kind, str(step // 3), ranks=members)
    name, kind = dice.choice("ab"), dice.choice(KINDS[:3])
    if what < 0.2:
        return request(Kind.BARRIER, name, process_set=number)
    if what < 0.6:
        return request(kind, name, process_set=number, shape=(6, dice.choice([1, 1, 2])))
    return request(
        kind,
        dice.choice("abcd"),
        process_set=number,
        group=dice.choice(["g", "g", "h", ""]),
        group_size=dice.choice([2, 2, 3]),
    )


# Join --------------------------------------------------------------------------------------------------------


@many
@given(dice_rolls)
def test_ranks_with_less_data_join_and_the_others_go_on(dice: random.Random) -> None:
    ranks = some_ranks(dice)
    names = [f"n{place}" for place in range(dice.randint(1, 4))]
    for _ in range(2):
        steps = [dice.randint(0, 4) for _ in range(ranks.size)]
        before = [len(ended) for ended in ranks.ended]
        for step in range(max(steps) + 1):
            queues: list[deque[Unit]] = [deque() for _ in range(ranks.size)]
            for rank, queue in enumerate(queues):
                if step < steps[rank]:
                    queue += shuffled(dice, [[allreduce(name)] for name in names])
                elif step == steps[rank]:
                    queue.append([request(Kind.JOIN, f"join{rank}")])  # The names of joins do not matter.
            play(dice, ranks, queues)
        assert ranks.is_quiet()
        last = set()
        for rank in range(ranks.size):
            ended = ranks.ended[rank][before[rank] :]
            counts = Counter(type(decision) for _, decision in ended)
            assert counts == Counter({Execute: steps[rank] * len(names), AllJoined: 1}) + Counter()
            last |= {decision.last_rank for _, decision in ended if isinstance(decision, AllJoined)}
        assert len(last) == 1
        assert steps[last.pop()] == max(steps)


# Removal -----------------------------------------------------------------------------------------------------


@many
@given(dice_rolls)
def test_nothing_waits_in_a_process_set_that_is_gone(dice: random.Random) -> None:
    ranks = some_ranks(dice)
    add_sets(dice, ranks)
    waiting: defaultdict[int, int] = defaultdict(int)
    for number, members in list(ranks.sets.items())[1:]:
        submitted: list[list[Request]] = [[] for _ in range(ranks.size)]
        for rank in dice.sample(members, dice.randint(0, len(members))):
            submitted[rank] = [allreduce(process_set=number), *group(Kind.ALLREDUCE, "g", 2, process_set=number)]
            waiting[number] += 1
        ranks.round(*submitted)
        removal = request(Kind.REMOVE_PROCESS_SET, str(number), ranks=members)
        for rank in dice.sample(range(ranks.size), ranks.size):
            ranks.round(*([removal] if each == rank else [] for each in range(ranks.size)))
        assert number not in ranks.sets
    assert ranks.is_quiet()
