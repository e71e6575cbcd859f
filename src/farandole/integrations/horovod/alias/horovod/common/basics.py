"""HorovodBasics: the calls about the process's place in the job, as methods."""

from __future__ import annotations

from typing import Any

import farandole


class HorovodBasics:
    """Provides any public function of Farandole as a method. Few scripts create one; `mpi_ops._basics` is one."""

    def __init__(self, *_: object) -> None:
        """Ignore the arguments: Horovod's class takes the path of its C++ library; there is none here."""

    def __getattr__(self, name: str) -> Any:
        return getattr(farandole, name)

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """Return the global ranks of each existing process set, by its number."""
        from farandole.integrations.horovod.named.process_sets import process_set_ids_and_ranks

        return process_set_ids_and_ranks()


_basics = HorovodBasics()
