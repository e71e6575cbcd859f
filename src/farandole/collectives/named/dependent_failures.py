"""Build the errors of operations that depend on each other, for each rank that submitted one of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from farandole.collectives.named.disagreement import ranks_in_words, who_says_what
from farandole.collectives.named.operation_requests import Fail, Key
from farandole.collectives.named.pending import Pending

_LISTED = 3  # of one rank's operations


def fail_group(group: Sequence[Pending], bad: Sequence[Fail]) -> list[Fail]:
    """Fail all operations of a group because of some, which have their own message."""
    messages = {fail.key: fail.message for fail in bad}
    why = f"another operation of its group {group[0].group!r} failed: {bad[0].message}"
    return [Fail(each.key, messages.get(each.key) or f"{_what(each.key)}: {why}") for each in group]


def fail_tangled(cluster: Sequence[Pending]) -> list[Fail]:
    """Fail all operations of a cluster; the message lists each rank's operations."""
    said: dict[int, list[str]] = {}
    for pending in cluster:
        for rank, part in zip(pending.members.ranks, pending.parts, strict=True):
            if part is not None:
                group = f" of group {part.group!r} with {part.group_size}" if part.group else ""
                said.setdefault(rank, []).append(_what(pending.key) + group)
    found = who_says_what((rank, _shortened(said[rank])) for rank in sorted(said))
    message = f"ranks disagree on what to do together: {found or 'all have submitted only a part of a group'}"
    return [Fail(pending.key, message) for pending in cluster]


def fail_strangers(pending: Pending) -> Fail:
    """Fail an operation that ranks outside of its process set have submitted."""
    number, ranks = pending.members.number, ranks_in_words(pending.members.ranks)
    who = f"{ranks_in_words(pending.strangers)} submitted it"
    return Fail(pending.key, f"{_what(pending.key)}: {who}, but process set {number} has {ranks}")


def give_up(pending: Pending, awaited: Sequence[int], together: Sequence[Pending]) -> list[Fail]:
    """Fail an operation that has waited for these ranks for too long, and all operations that belong to it."""
    message = (
        f"{_what(pending.key)} was given up after waiting for too long: {ranks_in_words(pending.submitted_by())} "
        f"submitted it, {ranks_in_words(awaited)} did not"
    )
    return [Fail(each.key, message) for each in together]


def _what(key: Key) -> str:
    return f"{key.kind.name.lower()} {key.name!r}"


def _shortened(names: list[str]) -> str:
    more = [f"{len(names) - _LISTED} more"] if len(names) > _LISTED else []
    return " and ".join(names[:_LISTED] + more)
