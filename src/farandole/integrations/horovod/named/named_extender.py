"""Adds named operations to each world: its engine, the process sets, and the file of HOROVOD_TIMELINE."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from farandole.base.env import HorovodSettings, read_horovod_settings
from farandole.base.membership import Placement
from farandole.integrations.horovod.named import process_sets
from farandole.integrations.horovod.named.engine import NamedCollectives
from farandole.integrations.horovod.named.process_sets import ProcessSet
from farandole.integrations.horovod.named.timeline import process_timeline, start_timeline
from farandole.training.collectives import world
from farandole.training.collectives.extension import Connect, SomeRanks
from farandole.training.collectives.transport import Transport


class NamedExtender:
    """The Extender of named operations (training/collectives/extension.py)."""

    def __init__(self) -> None:
        self._process_sets: list[ProcessSet] = []
        self._is_dynamic = False
        self._settings: HorovodSettings | None = None

    @property
    def carries_over(self) -> bool:
        return process_sets.has_added()

    def begin(self, process_sets: Sequence[SomeRanks] | str | None) -> None:
        self._is_dynamic = process_sets == "dynamic"
        self._settings = None  # scripts set variables before each init()
        given: Sequence[object] = [] if process_sets is None or self._is_dynamic else list(process_sets)
        self._process_sets = [each for each in given if isinstance(each, ProcessSet)]
        if len(self._process_sets) < len(given):
            raise ValueError(f'init(process_sets={process_sets!r}): expected a list of ProcessSet, or "dynamic"')

    def extend(self, transport: Transport, placement: Placement, connect: Connect) -> NamedCollectives:
        if self._settings is None:
            settings = read_horovod_settings()
            is_dynamic = settings.dynamic_process_sets or self._is_dynamic
            self._settings = msgspec.structs.replace(settings, dynamic_process_sets=is_dynamic)
        return NamedCollectives(transport, placement=placement, connect=connect, settings=self._settings)

    def entered(self, is_newcomer: bool) -> None:
        process_sets.register_static(self._process_sets, is_newcomer=is_newcomer)
        settings = self._settings
        # A newcomer is a rank 0, too, until it is admitted.
        if settings is not None and settings.timeline_file is not None and not is_newcomer:
            start_timeline(settings.timeline_file, settings.mark_cycles)

    def carry_over(self, was_newcomer: bool) -> None:
        process_sets.recreate(was_newcomer)

    def settled(self) -> None:
        """Continue the file of HOROVOD_TIMELINE as the next rank 0."""
        settings = self._settings
        if settings is not None and settings.timeline_file is not None and world.current().placement.rank == 0:
            process_timeline.continue_file(settings.timeline_file, settings.mark_cycles)

    def left(self) -> None:
        process_sets.forget_all()
