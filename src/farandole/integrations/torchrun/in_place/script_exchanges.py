"""What the workers tell each other of their scripts: the values that only a script knows, the batches of an epoch, and
what single ones have found out."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from torch.utils.data import DataLoader as TorchDataLoader

from farandole.integrations.torchrun.in_place.loop_shape import loop_variables
from farandole.integrations.torchrun.in_place.number_of_workers import NumberOfWorkers
from farandole.integrations.torchrun.in_place.script_loader import ScriptLoader
from farandole.integrations.torchrun.in_place.script_samplers import names_of
from farandole.integrations.torchrun.in_place.script_search import some
from farandole.integrations.torchrun.in_place.script_state import ScriptState
from farandole.integrations.torchrun.in_place.script_trials import ScriptTrials
from farandole.training.collectives import world
from farandole.training.data.listed_batches import ListedBatches
from farandole.training.state import packing
from farandole.training.state.step_state import StepState
from farandole.training.state.sync import receive
from farandole.training.worker.step_randomness import reseed
from farandole.training.worker.worker_job import WorkerJob

logger = logging.getLogger("farandole")


class _ScriptStanding(msgspec.Struct, frozen=True):
    """What the others have to know of a worker's script at a regroup.

    place   decided steps, epoch, and whether it was left, that its values belong to; nothing where it has those of a
            newcomer
    size    bytes of its values: (skeleton, tensors)
    """

    place: tuple[int, ...]
    size: tuple[int, int]


class _Told(msgspec.Struct, frozen=True, array_like=True):
    """What the members of a generation tell each other.

    known     the epoch whose batches are known; -1: none
    digest    of these batches
    gathers, differentiates, divides, trials, due  as in NumberOfWorkers
    static_because  why the job has to become static; empty: it has not
    is_on_trial  it is a newcomer that has not trained yet
    going_on  a generator of the script that goes on in the loop body; empty: there is none
    """

    known: int
    digest: bytes
    gathers: str
    differentiates: str
    divides: str
    trials: int
    due: int
    static_because: str
    is_on_trial: bool
    going_on: str


class ScriptExchanges:
    """Those of one worker, at each regroup.

    Args:
        job: Its job.
        state: The state beside the script's own values.
        loader: The loader of the script.
        script: The values that only the script knows.
        number: What is known of the script's dependence on the number of workers.
        trials: The trials of the script.
        record_batches: Called when the batches of the epoch have come from another worker.

    Attributes:
        lacks_values: This worker has not those of the others' script.
        size: Workers of the last generation.
        lost_in: The epoch in which a worker was lost last; -1: in none.
    """

    def __init__(
        self,
        job: WorkerJob | None,
        state: StepState,
        loader: ScriptLoader,
        script: ScriptState,
        number: NumberOfWorkers,
        trials: ScriptTrials,
        record_batches: Callable[[], None],
    ) -> None:
        self._job, self._state, self._loader, self._script = job, state, loader, script
        self._number, self._trials, self._record_batches = number, trials, record_batches
        self.lacks_values = job is not None and job.is_newcomer()
        self._has_to_seed = self.lacks_values  # its random numbers, where the others' are not the same on all of them
        self._received: dict[str, Any] | None = None  # the values, until the script is where theirs was
        self.size, self.lost_in = 0, -1

    def arrive(self) -> None:
        """Load the values of the others' script: this worker's script is where theirs was."""
        received, self._received, self.lacks_values = self._received, None, False
        if self._has_to_seed:
            reseed(self._loader.seed, self._state.step, world.current().placement.rank)
            self._has_to_seed = False
        if received is None:
            return
        self._trials.other_place = self._script.other_place(received, loop_variables())
        loaded, missing = self._script.apply(received)
        if loaded:
            logger.warning("carried over from the script's variables: %s", some(loaded))
        if missing and self._job is not None:
            text = f"a newcomer lacks {some(missing)}, which the others' script has"
            world.current().on_remark("newcomer", text)

    def scripts(self, place: tuple[int, ...]) -> None:
        """Let workers whose script is behind that of the others receive its values."""
        transport = world.current().transport
        packed = packing.pack(self._script.pack() if place else None)
        size = (len(packed.skeleton), packing.total_bytes(packed.tensors))
        by_rank = transport.all_gather(msgspec.msgpack.encode(_ScriptStanding(place, size)))
        standings = [msgspec.msgpack.decode(each, type=_ScriptStanding) for each in by_rank]
        self._note_lost(sum(bool(each.place) for each in standings))
        self.size = len(standings)
        newest = max(each.place for each in standings)
        if all(each.place == newest for each in standings):
            return
        source = next(rank for rank, each in enumerate(standings) if each.place == newest)
        received = receive(transport, source, packed, standings[source].size, needed=place < newest)
        if place < newest:
            self._received, self.lacks_values = received, True

    def _note_lost(self, remaining: int) -> None:
        """Say in the last line of the job what is gone with a lost worker."""
        if remaining < self.size:
            self.lost_in = self._loader.epoch
        if remaining < self.size and (gone := modules_as_a_whole(self._script.own())):
            world.remark("own values", f"what each worker has by itself is gone with a lost one: {some(gone)}")

    def batches(self) -> None:
        """Have the batches of the current epoch from the lowest rank that knows them, where this worker does not: it is
        a newcomer. And learn what others have found out about the script."""
        loader, transport = self._loader, world.current().transport
        going_on = min(self._script.going_on, default="")
        told = _Told(
            loader.known,
            loader.listed.digest,
            self._number.gathers,
            self._number.differentiates,
            self._number.divides,
            self._number.trials,
            self._number.due,
            loader.static_because,
            self._trials.is_on_trial,
            going_on,
        )
        packed = transport.all_gather(msgspec.msgpack.encode(told))
        by_rank = [msgspec.msgpack.decode(each, type=_Told) for each in packed]
        self._trials.on_trial = [rank for rank, each in enumerate(by_rank) if each.is_on_trial]
        self._trials.going_on = next((each.going_on for each in by_rank if each.going_on), "")
        ranks = [rank for rank, each in enumerate(by_rank) if each.known == loader.epoch]  # none: the epoch begins
        if ranks and any((each.known, each.digest) != (loader.epoch, by_rank[ranks[0]].digest) for each in by_rank):
            batches = transport.all_gather(loader.listed.pack() if transport.rank == ranks[0] else b"")[ranks[0]]
            if (loader.known, loader.listed.digest) != (loader.epoch, by_rank[ranks[0]].digest):
                loader.know(ListedBatches.unpack(batches))
                self._record_batches()
        loader.static_because = loader.static_because or next(
            (each.static_because for each in by_rank if each.static_because), ""
        )
        self._number.gathers = next((each.gathers for each in by_rank if each.gathers), "")
        self._number.differentiates = next((each.differentiates for each in by_rank if each.differentiates), "")
        self._number.divides = next((each.divides for each in by_rank if each.divides), "")
        self._number.trials = max(each.trials for each in by_rank)
        self._number.due = max(each.due for each in by_rank)
        self._number.fix()


def modules_as_a_whole(names: Iterable[str]) -> list[str]:
    """Return main().ema instead of main().ema._modules['0']._parameters['weight']."""
    return sorted({re.split(r"\._(?:modules|parameters|buffers)\[", each)[0] for each in names})


class _Listed(msgspec.Struct, frozen=True, array_like=True):
    """The digest of the batches that a worker has listed, or the reason why it has none."""

    digest: bytes
    reason: str


def reason_of(digest: bytes, reason: str, theirs: TorchDataLoader[Any]) -> str:
    """Return the reason, alike on all workers, why they do not have the same batches for an epoch; empty: they have.

    Args:
        digest: Of the batches that this worker has listed for all of them.
        reason: Why it has none.
        theirs: The DataLoader of the script.

    Raises:
        RecoverableError: A worker is lost.
    """
    packed = world.current().transport.all_gather(msgspec.msgpack.encode(_Listed(digest, reason)))
    by_rank = [msgspec.msgpack.decode(each, type=_Listed) for each in packed]
    found = next((each.reason for each in by_rank if each.reason), "")
    if not found and any(each.digest != by_rank[0].digest for each in by_rank):
        found = (
            f"its sampler {names_of(theirs)} does not tell which samples other workers have: they have listed other "
            f"batches than this one expected"
        )
    return found
