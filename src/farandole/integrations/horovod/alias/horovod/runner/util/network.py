"""The test whether a host is this machine."""

from __future__ import annotations

from collections.abc import Iterable

from farandole.job.engines.host_list import is_this_machine


def filter_local_addresses(all_host_names: Iterable[str]) -> list[str]:
    """Return the names that do not refer to this machine."""
    return [name for name in all_host_names if not is_this_machine(name)]
