"""What a round decides: examples, one rule each. tests/property/test_negotiation_schedules.py has random ones."""

from __future__ import annotations

import pytest

from farandole.errors import ProtocolError
from farandole.integrations.horovod.named.negotiation import Negotiation
from farandole.integrations.horovod.named.stages import (
    END,
    AllJoined,
    Execute,
    Fail,
    Key,
    Kind,
    Request,
    RequestList,
    SetAdded,
    SetRemoved,
)
from farandole.training.collectives.transport import Reduction
from tests.support.negotiating import Ranks, allreduce, group, request

JOIN = request(Kind.JOIN, "join")
ENDED = Request(END)


def add(*ranks: int, name: str = "0") -> Request:
    return request(Kind.ADD_PROCESS_SET, name, ranks=ranks)


def remove(*ranks: int, name: str = "0") -> Request:
    return request(Kind.REMOVE_PROCESS_SET, name, ranks=ranks)


def names(execute: object) -> list[str]:
    assert isinstance(execute, Execute)
    return [operation.key.name.split(".", 1)[1] for operation in execute.operations]


def message(decision: object) -> str:
    assert isinstance(decision, Fail)
    return decision.message


# Completion -------------------------------------------------------------------------------------------------


def test_an_operation_is_carried_out_once_all_ranks_have_submitted_it() -> None:
    ranks = Ranks(3)
    assert ranks.round([allreduce()]) == []
    assert ranks.round([], [allreduce()]) == []
    (decision,) = ranks.round([], [], [allreduce()])
    assert isinstance(decision, Execute)
    assert decision.operations[0].requests == (allreduce(),) * 3


def test_the_order_in_which_ranks_submit_does_not_matter() -> None:
    ranks = Ranks(2, fusion_bytes=0)
    a, b = allreduce("a"), allreduce("b")
    decisions = ranks.round([a, b], [b, a])
    assert sorted(names(each)[0] for each in decisions) == ["a", "b"]


def test_one_rank_alone_waits_for_nobody() -> None:
    assert names(Ranks(1).round([allreduce()])[0]) == ["x"]


def test_a_name_is_free_again_after_its_operation() -> None:
    ranks = Ranks(2)
    for _ in range(3):
        assert names(ranks.everybody(allreduce())[0]) == ["x"]


def test_one_name_in_two_kinds_is_two_operations() -> None:
    ranks = Ranks(2)
    both = [allreduce(), request(Kind.BROADCAST)]
    assert [each.key.kind for each in ranks.round(both, both[:1])[0].operations] == [Kind.ALLREDUCE]  # type: ignore[union-attr]
    assert names(ranks.round([], both[1:])[0]) == ["x"]


def test_what_waits_is_told_with_the_ranks_that_are_missing() -> None:
    ranks = Ranks(3)
    ranks.round([allreduce("a")], [allreduce("a"), allreduce("b")])
    first, second = ranks.negotiations[0].waiting()
    assert (first.submitted_by, first.missing) == ((0, 1), (2,))
    assert (second.submitted_by, second.missing) == ((1,), (0, 2))


# Mistakes ---------------------------------------------------------------------------------------------------


def test_ranks_that_differ_all_get_an_error_and_the_next_try_may_work() -> None:
    ranks = Ranks(3)
    decisions = ranks.round([allreduce()], [allreduce(dtype="int64")], [allreduce()])
    assert "ranks 0 and 2 have float32, rank 1 has int64" in message(decisions[0])
    assert names(ranks.everybody(allreduce())[0]) == ["x"]


def test_different_kinds_under_one_name_fail_on_both_sides() -> None:
    ranks = Ranks(3)
    assert ranks.round([allreduce()], [request(Kind.ALLGATHER)]) == []
    decisions = ranks.round([], [], [allreduce()])
    assert {each.key.kind for each in decisions if isinstance(each, Fail)} == {Kind.ALLREDUCE, Kind.ALLGATHER}
    found = "ranks 0 and 2 submitted allreduce 'allreduce.x', rank 1 submitted allgather 'allgather.x'"
    assert found in message(decisions[0])
    assert ranks.is_quiet()


def test_unnamed_operations_of_two_kinds_have_nothing_to_do_with_each_other() -> None:
    ranks = Ranks(2)
    there, here = allreduce("noname.0"), request(Kind.BROADCAST, "noname.0")
    assert ranks.round([there], [here]) == []
    assert len(ranks.round([here], [there])) == 2


def test_a_rank_outside_the_process_set_fails_with_the_members() -> None:
    ranks = Ranks(3)
    ranks.everybody(add(0, 1))
    inside = allreduce(process_set=1)
    assert ranks.round([], [], [inside]) == []
    decisions = ranks.round([inside], [inside])
    assert "rank 2 submitted it, but process set 1 has ranks 0 and 1" in message(decisions[0])


def test_a_process_set_that_was_never_added_is_an_error_at_once() -> None:
    decisions = Ranks(2).round([allreduce(process_set=7)])
    assert "process set 7 was never added" in message(decisions[0])


def test_words_that_nobody_can_mean_are_an_error() -> None:
    negotiation = Negotiation(2)
    with pytest.raises(ProtocolError, match="place 3 of the cache"):
        negotiation.round([RequestList(repeated=(3,)), RequestList()])
    with pytest.raises(ProtocolError, match="twice"):
        negotiation.round([RequestList((allreduce(), allreduce())), RequestList()])
    with pytest.raises(ProtocolError, match="request lists of 2 ranks"):
        negotiation.round([RequestList()])


# Groups -----------------------------------------------------------------------------------------------------


def test_a_group_is_carried_out_together_whatever_its_size() -> None:
    ranks = Ranks(2, fusion_bytes=0)
    whole = group(Kind.ALLREDUCE, "g", 3)
    assert ranks.round(whole, whole[:1]) == []
    assert names(ranks.round([], whole[1:])[0]) == ["g_1of3", "g_2of3", "g_3of3"]


def test_a_group_of_two_dtypes_is_one_buffer_for_each() -> None:
    ranks = Ranks(2)
    whole = group(Kind.ALLREDUCE, "g", 3)
    whole[1] = Request(whole[1].key, "int64", (60, 2), group=whole[1].group, group_size=3)
    assert [names(each) for each in ranks.everybody(*whole)] == [["g_1of3", "g_3of3"], ["g_2of3"]]


def test_a_group_of_allgathers_is_carried_out_one_by_one_in_a_row() -> None:
    decisions = Ranks(2).everybody(*group(Kind.ALLGATHER, "g", 2), allreduce())
    assert sorted(map(names, decisions)) == [["g_1of2"], ["g_2of2"], ["x"]]


def test_all_of_a_group_fail_with_one_of_them() -> None:
    ranks = Ranks(2)
    whole = group(Kind.ALLREDUCE, "g", 3)
    other = group(Kind.ALLREDUCE, "g", 3)
    other[1] = Request(other[1].key, "int64", (60, 2), group=other[1].group, group_size=3)
    decisions = ranks.round(whole, other)
    assert len(decisions) == 3
    assert "rank 1 has int64" in message(decisions[1])
    assert "another operation of its group 'grouped_allreduce.g' failed" in message(decisions[0])


@pytest.mark.parametrize(
    "other",
    [
        group(Kind.ALLREDUCE, "g", 3),
        group(Kind.ALLGATHER, "g", 2),
        [allreduce("g_1of2"), allreduce("g_2of2")],
        [request(Kind.BROADCAST, "g_2of2")],
        [allreduce("g")],
        group(Kind.ALLGATHER, "g", 1),
    ],
    ids=[
        "another size",
        "another kind",
        "no group",
        "another kind, no group",
        "one of this name",
        "another kind and size",
    ],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_ranks_that_group_differently_all_get_errors(other: list[Request], is_late: bool) -> None:
    ranks = Ranks(2)
    decisions = ranks.round(group(Kind.ALLREDUCE, "g", 2), [] if is_late else other)
    if is_late:
        assert decisions == []
        decisions = ranks.round([], other)
    assert decisions
    assert all("rank 0 submitted allreduce" in message(each) for each in decisions)
    assert ranks.is_quiet()


def test_what_waits_for_the_rest_of_its_group_names_who_holds_it_up() -> None:
    ranks = Ranks(2)
    whole = group(Kind.ALLREDUCE, "g", 2)
    ranks.round(whole, whole[:1])
    assert [each.missing for each in ranks.negotiations[0].waiting()] == [(1,), (1,)]


# Join -------------------------------------------------------------------------------------------------------


def test_a_rank_that_has_joined_takes_part_with_nothing() -> None:
    ranks = Ranks(3)
    ranks.round([], [JOIN])
    (decision,) = ranks.round([allreduce()], [], [allreduce()])
    assert isinstance(decision, Execute)
    assert decision.operations[0].requests == (allreduce(), None, allreduce())


def test_joining_completes_what_waited_for_that_rank() -> None:
    ranks = Ranks(2)
    ranks.round([allreduce(), request(Kind.BARRIER, "0")])
    assert sorted(map(names, ranks.round([], [JOIN]))) == [["0"], ["x"]]


@pytest.mark.parametrize("kind", [Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.REDUCESCATTER])
def test_other_kinds_fail_while_a_rank_has_joined(kind: Kind) -> None:
    ranks = Ranks(3)
    ranks.round([], [JOIN])
    decisions = ranks.round([request(kind)], [], [request(kind)])
    assert "rank 1 has called join(); only allreduce and barrier work then" in message(decisions[0])


def test_the_end_is_reached_once_all_ranks_have_left_and_is_no_stall_before() -> None:
    ranks = Ranks(2)
    assert ranks.round([ENDED]) == []
    assert ranks.negotiations[0].waiting() == []
    (decision,) = ranks.round([], [ENDED])
    assert isinstance(decision, Execute)


def test_what_waits_for_a_rank_that_has_left_fails_with_the_end() -> None:
    ranks = Ranks(3)
    ranks.round([ENDED])
    decisions = ranks.round([], [allreduce()])
    assert {each.key for each in decisions if isinstance(each, Fail)} == {END, allreduce().key}
    assert "rank 0 has left the elastic function, and allreduce 'allreduce.x' of rank 1 waits for it" in message(
        decisions[0]
    )


def test_what_was_submitted_before_a_rank_left_is_carried_out() -> None:
    ranks = Ranks(2)
    assert ranks.round([allreduce(), ENDED]) == []
    (decision,) = ranks.round([], [allreduce()])
    assert names(decision) == ["x"]


def test_what_a_rank_submitted_before_it_joined_counts() -> None:
    ranks = Ranks(2)
    ranks.round([], [request(Kind.ALLGATHER), JOIN])
    assert names(ranks.round([request(Kind.ALLGATHER)])[0]) == ["x"]


def test_the_last_to_join_is_told_and_everything_starts_anew() -> None:
    ranks = Ranks(3)
    for _ in range(2):
        ranks.round([], [JOIN])
        decisions = ranks.round([allreduce(), JOIN], [], [JOIN])
        assert names(decisions[0]) == ["x"]
        assert decisions[1:] == [AllJoined(0, 2)]
        (decision,) = ranks.everybody(request(Kind.ALLGATHER))
        assert isinstance(decision, Execute)


def test_a_group_that_a_rank_left_half_submitted_when_it_joined_is_decided() -> None:
    ranks = Ranks(2)
    whole = group(Kind.ALLREDUCE, "g", 2)
    ranks.round([whole[0], JOIN])
    ranks.round([], [*whole, JOIN])
    assert ranks.is_quiet()


def test_a_cached_request_of_a_rank_that_has_joined_since_is_no_obstacle() -> None:
    ranks = Ranks(2)
    for _ in range(2):
        ranks.everybody(allreduce())
    ranks.round([JOIN])
    (decision,) = ranks.round([], [allreduce()])
    assert isinstance(decision, Execute)
    assert decision.operations[0].requests == (None, allreduce())


def test_another_thread_of_a_rank_that_has_joined_may_still_take_part() -> None:
    ranks = Ranks(3)
    ranks.round([], [], [JOIN])
    (decision,) = ranks.everybody(allreduce())
    assert isinstance(decision, Execute)
    assert decision.operations[0].requests == (allreduce(),) * 3


# Process sets -----------------------------------------------------------------------------------------------


def test_ids_are_counted_and_never_given_twice() -> None:
    ranks = Ranks(3)
    assert ranks.everybody(add(0, 1)) == [SetAdded(add(0, 1).key, 1, (0, 1))]
    assert ranks.everybody(remove(0, 1)) == [SetRemoved(remove(0, 1).key, 1)]
    assert ranks.everybody(add(1, 2)) == [SetAdded(add(1, 2).key, 2, (1, 2))]


def test_a_process_set_needs_its_members_only() -> None:
    ranks = Ranks(3)
    ranks.everybody(add(0, 2))
    here = allreduce(process_set=1)
    (decision,) = ranks.round([here], [], [here])
    assert isinstance(decision, Execute)
    assert decision.operations[0].ranks == (0, 2)


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ([add(0, 1), add(0, 1), add(0, 2)], "ranks 0 and 1 have [0, 1], rank 2 has [0, 2]"),
        ([add(0, 1, 2)] * 3, "there is a process set of ranks [0, 1, 2] already, with id 0"),
        ([add(1, 3)] * 3, "some of the ranks 0 to 2"),
        ([add()] * 3, "some of the ranks 0 to 2"),
        ([remove(0, 1)] * 3, "there is no such process set"),
        ([remove(0, 1, 2)] * 3, "it has all ranks"),
    ],
)
def test_a_process_set_that_cannot_be_is_an_error_everywhere(requests: list[Request], expected: str) -> None:
    assert expected in message(Ranks(3).round(*[[each] for each in requests])[0])


def test_the_same_process_set_twice_is_an_error_with_its_id() -> None:
    ranks = Ranks(3)
    decisions = ranks.everybody(add(0, 1, name="0"), add(0, 1, name="1"))
    assert isinstance(decisions[0], SetAdded)
    assert "already, with id 1" in message(decisions[1])


def test_what_waits_in_a_removed_process_set_fails() -> None:
    ranks = Ranks(3)
    ranks.everybody(add(0, 1))
    here, join = allreduce(process_set=1), request(Kind.JOIN, "join", process_set=1)
    ranks.round([here], [join])
    decisions = ranks.round([remove(0, 1), allreduce("late", process_set=1)], [remove(0, 1)], [remove(0, 1)])
    assert isinstance(decisions[0], Execute)  # of rank 0 alone, as rank 1 has joined
    assert isinstance(decisions[-1], SetRemoved)
    assert "process set 1 was removed" in message(ranks.round([here])[0])
    assert ranks.is_quiet()


# Stalls -----------------------------------------------------------------------------------------------------


def test_what_is_given_up_fails_with_the_missing_ranks() -> None:
    ranks = Ranks(3)
    ranks.round([allreduce()], [], [allreduce()])
    (decision,) = ranks.round(expired=[allreduce().key])
    assert "ranks 0 and 2 submitted it, rank 1 did not" in message(decision)
    assert ranks.is_quiet()


def test_what_is_decided_meanwhile_is_not_given_up() -> None:
    ranks = Ranks(2)
    ranks.round([allreduce()])
    (decision,) = ranks.round([], [allreduce()], expired=[allreduce().key])
    assert isinstance(decision, Execute)


def test_a_group_is_given_up_as_a_whole() -> None:
    ranks = Ranks(2)
    whole = group(Kind.ALLREDUCE, "g", 3)
    ranks.round(whole, whole[:1])
    assert len(ranks.round(expired=[whole[2].key])) == 3
    assert ranks.is_quiet()


def test_giving_one_group_up_ends_what_hung_on_it() -> None:
    ranks = Ranks(1)
    unfinished = request(Kind.BROADCAST, "a", group="h", group_size=2)
    wrong = [allreduce(name, group="g", group_size=1) for name in "ab"]  # two operations of a group of one
    assert ranks.round([unfinished]) == []
    assert ranks.round(wrong) == []  # "a" has two meanings, and one of them is not finished.
    assert len(ranks.round(expired=[unfinished.key])) == 3
    assert ranks.is_quiet()


# Fusion and cache -------------------------------------------------------------------------------------------


def test_allreduces_that_are_alike_share_a_buffer_up_to_a_size() -> None:
    each = [allreduce(str(number), shape=(10, 10)) for number in range(5)]
    decisions = Ranks(2, fusion_bytes=800).everybody(*each)
    assert [names(decision) for decision in decisions] == [["0", "1"], ["2", "3"], ["4"]]


def test_what_is_not_alike_does_not_share_a_buffer() -> None:
    decisions = Ranks(2).everybody(
        allreduce("a"),
        allreduce("b", dtype="int64"),
        allreduce("c", op=int(Reduction.MAX)),
        allreduce("d", prescale=0.5),
        allreduce("e", device=0),
        allreduce("f", op=int(Reduction.ADASUM)),
        allreduce("g", op=int(Reduction.ADASUM)),
        request(Kind.ALLGATHER, "h"),
        request(Kind.ALLGATHER, "i"),
        allreduce("j"),
    )
    assert [names(each) for each in decisions] == [["a", "j"], *([name] for name in "bcdefghi")]


def test_a_repeated_request_is_said_with_a_number() -> None:
    ranks = Ranks(2)
    ranks.everybody(allreduce("a"), allreduce("b"))
    ranks.everybody(allreduce("b"), allreduce("a"))
    assert ranks.request_lists == [RequestList(repeated=(1, 0))] * 2


def test_a_changed_request_is_said_in_full_by_the_rank_where_it_changed() -> None:
    ranks = Ranks(2)
    first, second = request(Kind.ALLGATHER, shape=(60, 2)), request(Kind.ALLGATHER, shape=(5, 2))
    ranks.everybody(first)
    ranks.round([first], [second])
    assert ranks.request_lists == [RequestList(repeated=(0,)), RequestList(requests=(second,))]
    ranks.round([first], [second])
    assert ranks.request_lists == [RequestList(repeated=(0,))] * 2


def test_the_cache_forgets_what_was_not_used_for_longest() -> None:
    ranks = Ranks(2, cache_capacity=2)
    for name in ("a", "b", "a", "c", "a"):
        ranks.everybody(allreduce(name))
    assert ranks.request_lists == [RequestList(repeated=(0,))] * 2
    ranks.everybody(allreduce("b"))
    assert ranks.request_lists == [RequestList((allreduce("b"),))] * 2


def test_a_failed_operation_is_not_remembered() -> None:
    ranks = Ranks(2)
    ranks.round([allreduce()], [allreduce(dtype="int64")])
    ranks.everybody(allreduce())
    assert ranks.request_lists == [RequestList((allreduce(),))] * 2


def test_without_a_cache_everything_is_said_in_full() -> None:
    ranks = Ranks(2, cache_capacity=0)
    for _ in range(3):
        ranks.everybody(allreduce())
        assert ranks.request_lists == [RequestList((allreduce(),))] * 2


def test_a_round_seen_before_has_the_same_outcome_until_something_changes() -> None:
    ranks = Ranks(2, cache_capacity=2)
    a, b = allreduce("a"), allreduce("b")
    for _ in range(4):
        assert names(ranks.everybody(a, b)[0]) == ["a", "b"]
    changed = allreduce("b", dtype="int64")
    assert [names(each) for each in ranks.everybody(a, changed)] == [["a"], ["b"]]
    for _ in range(3):
        assert [names(each) for each in ranks.everybody(a, changed)] == [["a"], ["b"]]


def test_keys_of_process_sets_do_not_meet() -> None:
    ranks = Ranks(2)
    ranks.everybody(add(0))
    inner = allreduce(process_set=1)
    (decision,) = ranks.round([inner, allreduce()])
    assert names(decision) == ["x"]
    assert [each.key for each in ranks.negotiations[1].waiting()] == [Key(0, Kind.ALLREDUCE, "allreduce.x")]
