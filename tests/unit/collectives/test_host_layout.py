"""Which ranks are on which host, and which of them talk across hosts."""

from __future__ import annotations

from farandole.training.collectives.hierarchical_transport import HostLayout, layout, pack_trailers, unpack_trailers


def test_the_ranks_of_a_host_need_not_follow_each_other() -> None:
    assert layout("abab", 2) == HostLayout(hosts=((0, 2), (1, 3)), host=0, place=1)
    assert layout("abab", 2).mates == (0, 2)
    assert layout("abab", 2).across == (2, 3)


def test_as_many_rings_lead_across_as_the_smallest_host_has_ranks() -> None:
    hosts = "aaabb"
    assert {layout(hosts, rank).rings for rank in range(5)} == {2}
    assert [layout(hosts, rank).across for rank in range(5)] == [(0, 3), (1, 4), (), (0, 3), (1, 4)]


def test_each_rank_is_found_on_its_host() -> None:
    hosts = "abcab"
    seen = layout(hosts, 0)
    assert [seen.find(rank) for rank in range(5)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)]
    assert all(layout(hosts, rank).hosts == seen.hosts for rank in range(5))
    assert seen.most_mates == 2


def test_notes_come_back_by_rank_whatever_the_hosts() -> None:
    hosts = layout("abcab", 0).hosts
    packed = [pack_trailers([b"trailer%d" % rank for rank in ranks], most=2) for ranks in hosts]
    assert len({len(each) for each in packed}) == 1
    assert unpack_trailers(packed, hosts, 8) == [b"trailer%d" % rank for rank in range(5)]


def test_empty_notes_stay_empty() -> None:
    assert pack_trailers([b"", b""], most=3) == b""
    assert unpack_trailers([b"", b""], ((0, 1), (2,)), 0) == [b"", b"", b""]
