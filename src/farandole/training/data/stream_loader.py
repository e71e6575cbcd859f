"""fd.elastic.StreamLoader: samples of streams, each exactly once per epoch, for any number of workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import default_collate

from farandole.base.env import read_job_env
from farandole.base.membership import Shortfall
from farandole.errors import ConfigError, DataError
from farandole.training.data.elastic_loader import ElasticLoader
from farandole.training.data.loader_arguments import STREAM_ARGUMENTS, most_samples, refuse_torch_arguments
from farandole.training.data.partition import Sizes, even_slice
from farandole.training.data.permutation import FORMAT_VERSION
from farandole.training.data.prefetch import Prefetch, torch_loader
from farandole.training.data.stream_order import StreamPosition
from farandole.training.data.stream_reader import FetchRequests, FetchStart, Reply, StreamReader
from farandole.training.data.streams import Mark, Source
from farandole.training.state import step
from farandole.training.state.batch import Batch, GlobalBatch
from farandole.training.state.session import SESSION

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext


class StreamLoader(ElasticLoader):
    """Yields the samples of an IterableDataset in global batches, divided among the current workers.

    The data set is read as a fixed number of streams, which take turns; the k-th global batch has the same samples for
    every number of workers. The position of the training is an offset for each stream. Stream v of V is opened as
    follows:
        dataset.stream(v, V)                    an iterable, if the data set has this method
        dataset.shard(num_shards=V, index=v)    else, if it has this one, as Hugging Face's data sets do
        each V-th sample of the data set        else; the data set is read V times then, so that 1 stream is best
    A stream that is opened again in one epoch, or in another process, has to yield the same samples. set_epoch(epoch)
    is called before, if the data set has it. A worker that joins opens the streams at their offsets: with skip(n) of
    the opened stream if it exists, else by reading the samples before, or see `stateful`. The other workers read on.

    Workers compare samples of each global batch: a data set that divides itself by rank, or shuffles without a common
    seed, is an error (CollectiveMismatch) in the first step in which it shows. With stream_length(), below, they
    compare the lengths only.

    The end of a stream is unknown before it is read, and all workers must know it. So every worker, and each of its
    loader workers, reads all streams, and only `transform` and `collate_fn` are divided, unless the data set has
        dataset.stream_length(v, V)             samples of a stream: a worker then reads only streams that it needs,
                                                the same ones each time when global_batch_size is a multiple of V

    As in torch, each loop over the batches starts loader processes, with the data set as it is then; they continue when
    the world changes. They keep the samples that are read and not trained, of about prefetch_factor * num_workers
    global batches each. While the data set is read, get_worker_info() is None: it must not divide itself among them.

    Args:
        dataset: An iterable, or an object with stream().
        global_batch_size: Samples of one optimizer step, over all workers; the last one of an epoch may be shorter.
        streams: V, fixed for the life of the saved state.
        seed: Seed of random numbers: those of the steps, and those that `transform` draws, which depend on seed, epoch
            and position.
        stateful: Save the state_dict() of each stream (torchdata's protocol Stateful), and open the stream with
            load_state_dict() instead of reading the samples before. The opened stream has both methods, or its iterator
            does. A stream must then continue exactly with the next sample: a shuffle buffer that its state omits would
            be lost. With stream_length() a worker knows the states of streams that it reads; others are opened as
            without `stateful`. A checkpoint accepts states of plain values, containers and tensors.
        transform: Maps one sample to the value that is collated: the costly part, run only by the worker that trains
            it.
        sample_key: Maps one sample, before `transform`, to the value by which workers compare it; None: the sample
            itself. Give it where samples differ between workers by nature, as with random numbers that the data set
            draws.
        num_workers: Loader processes of this worker, as in torch's DataLoader; so are the following arguments.
        collate_fn: Makes a batch of a list of samples, as in torch.
        pin_memory: As in torch.
        pin_memory_device: As in torch.
        timeout: Seconds to wait for a batch of a loader process, as in torch; 0: for ever.
        prefetch_factor: As in torch.
        worker_init_fn: As in torch.
        multiprocessing_context: As in torch.
        persistent_workers: As in DataLoader.
        max_local_batch: As in DataLoader, like dummy batches.
        micro_batch_size: As in DataLoader.
        min_local_batch: As in DataLoader.
        **refused: Arguments of torch's DataLoader that cannot be supported: ConfigError says what to do instead.

    Attributes:
        epoch: The current epoch. Position and epoch change with decided steps only.
        batch: The current batch; None before the first and after the last one.
        indices: Its samples, as v + V * (number in stream v); none for a dummy batch.

    Raises:
        DataError: With the values, for invalid sizes, and for an iterator, which could be read only once.
        ConfigError: Arguments of torch's DataLoader cannot be supported.

    Examples:
        ```python
        class Lines(torch.utils.data.IterableDataset):
            def __iter__(self):
                chance = torch.Generator().manual_seed(0)  # every worker reads the same samples
                return iter([(torch.randn(8, generator=chance), i % 2) for i in range(40)])


        loader = fd.elastic.StreamLoader(Lines(), global_batch_size=8)
        state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)


        @fd.elastic.run
        def train(state):
            for epoch in loader.epochs(1):
                for x, y in loader:
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()


        train(state)
        ```
    """

    is_stream = True
    _layout: Sizes

    def __init__(
        self,
        dataset: Iterable[Any],
        global_batch_size: int = 0,
        *,
        streams: int = 1,
        seed: int = 0,
        stateful: bool = False,
        transform: Callable[[Any], Any] | None = None,
        sample_key: Callable[[Any], Any] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        pin_memory_device: str = "",
        timeout: float = 0,
        prefetch_factor: int | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        persistent_workers: bool = False,
        max_local_batch: int | None = None,
        micro_batch_size: int | None = None,
        min_local_batch: int = 1,
        **refused: object,
    ) -> None:
        refuse_torch_arguments(refused, type(self).__init__.__annotations__, "StreamLoader", STREAM_ARGUMENTS)
        if read_job_env().strict:
            raise ConfigError(
                "--strict: the samples of a StreamLoader cannot be divided into the same shards in every world; give "
                "elastic.DataLoader a data set with __len__ and __getitem__, or leave --strict out"
            )
        if read_job_env().balance == "auto":
            raise ConfigError(
                "--balance auto: a StreamLoader cannot divide the samples of its streams by the speed of the workers; "
                "give elastic.DataLoader a data set with __len__ and __getitem__, or leave --balance out"
            )
        self._layout = Sizes(global_batch_size, most_samples(max_local_batch, micro_batch_size), min_local_batch)
        _check(dataset, streams)
        super().__init__(seed, accumulates=micro_batch_size is not None)
        self.dataset = dataset
        self._is_stateful = stateful
        self._place = self._behind = StreamPosition((0,) * streams)  # before and after the step of the current batch
        self._end: tuple[int, StreamPosition] | None = None  # an epoch, and its end
        self._marks: list[Mark | None] = [None] * streams
        self._marks_behind: dict[int, Mark] = {}
        self._requests = FetchRequests(num_workers, FetchStart(0, 0, self._place, 0, 1, self._layout))
        source = Source(dataset, streams, stateful)
        self._reader = StreamReader(source, seed, transform, collate_fn or default_collate, sample_key)
        arguments = {
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "pin_memory_device": pin_memory_device,
            "timeout": timeout,
            "prefetch_factor": prefetch_factor,
            "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context,
        }
        inner = torch_loader(self._reader, arguments, batch_size=None, sampler=self._requests, collate_fn=_as_it_is)
        self._prefetch = Prefetch(inner, self._requests, keeps_processes=persistent_workers)

    @property
    def cursor(self) -> int:
        """Number of samples of the epoch that were trained, by all workers together."""
        return self._place.cursor

    # Iterating -------------------------------------------------------------------------------------------

    def _next(self, goes_on: bool) -> Any:
        is_rehearsal = step.is_rehearsal() if goes_on else self.hooks.rehearses()
        if is_rehearsal and not goes_on:
            self._rehearse_a_change()
        while True:
            is_over = self._is_ended or self.record.has_all_steps or (self.epoch, self._place) == self._end
            reply, data = self._take() if goes_on or not is_over else (Reply(None, None), None)
            if reply.batch is not None and reply.behind is not None:
                return self._hand_out(reply, data, goes_on, is_rehearsal)
            if not is_over:
                self._end = (self.epoch, self._place)
            self._restart()
            if self._has_regrouped:  # the first batch of the epoch, whose step is aborted
                place = StreamPosition((0,) * len(self._marks))
                self._requests.restart(self._fetch_start_at(place), (None,) * len(self._marks))
                self._has_regrouped, is_rehearsal = False, True
                reply, data = self._take()
                if reply.batch is not None and reply.behind is not None:
                    return self._hand_out(reply, data, False, is_rehearsal)
            if self._leave():
                self.record.is_through = True
                raise StopIteration

    def _hand_out(self, reply: Reply, data: Any, goes_on: bool, is_rehearsal: bool) -> Any:
        assert reply.batch is not None
        assert reply.behind is not None
        # The optimizer recognizes micro-batches of one step by their global batch, the very same object.
        global_batch = self.batch.global_batch if goes_on and self.batch is not None else reply.batch.global_batch
        self.batch = Batch(global_batch, reply.batch.low, reply.batch.high, reply.batch.index)
        self._behind, self._is_pending = reply.behind, True
        self._has_regrouped, self._has_to_leave = False, True
        self._marks_behind = dict(reply.marks)
        streams = len(self._marks)
        self.indices = [] if self.batch.is_dummy else [stream + streams * number for stream, number in reply.taken]
        step.open(self.batch, is_rehearsal)
        self._padding.keep(data)
        if not is_rehearsal:
            SESSION.recorder.delivered(self.batch, self.indices)
        return data

    def _rehearse_a_change(self) -> None:
        sizes, rank, world = self._rehearsed_division(self._layout)
        if (sizes, rank, world) != (self._layout, self._rank, self._world):
            fetch_start = dataclasses.replace(self._fetch_start_at(self._place), rank=rank, world=world, sizes=sizes)
            self._requests.restart(fetch_start, tuple(self._marks))

    def _advance(self) -> None:
        self.record.end_epoch(is_whole=self.record.is_through)
        self._begin(self.epoch + 1, StreamPosition((0,) * len(self._marks)), ())

    def _take(self) -> tuple[Reply, Any]:
        """Return the next batch; a reply without a batch at the end of the epoch."""
        try:
            while True:
                request, (reply, data) = self._prefetch.take()
                self._requests.answered(request, reply.behind)
                if reply.batch is not None or reply.behind is None:
                    return reply, data
        except BaseException as error:
            self.close()  # batches being fetched no longer match the requests
            if isinstance(error, StopIteration):  # would look like the end of the epoch
                raise DataError("the data set raised StopIteration when it was opened") from error
            raise

    # The current batch -----------------------------------------------------------------------------------

    def commit(self, global_batch: GlobalBatch) -> None:
        """Move the offsets behind the samples of `global_batch`, whose step is decided.

        Args:
            global_batch: The global batch of the current batch.

        Raises:
            DataError: It is another global batch: stale, or committed already. Nothing is changed.
        """
        out = self.global_batch if self._is_pending else None
        place = global_batch.epoch, global_batch.start, global_batch.stop
        if out is None or place != (out.epoch, out.start, out.stop):
            raise DataError(
                f"cannot commit samples [{global_batch.start}, {global_batch.stop}) of epoch {global_batch.epoch}: "
                f"training is at sample {self.cursor} of epoch {self.epoch}; commit each global batch once, before the "
                f"next batch is requested"
            )
        self._place, self._is_pending = self._behind, False
        self.record.decide(self.epoch)
        for stream, mark in self._marks_behind.items():
            self._marks[stream] = mark
        self._requests.floor, self._requests.marks = self._place.offsets, tuple(self._marks)

    def shortfall(self) -> Shortfall | None:
        """Return DataLoader.shortfall() without steps: the number of steps in a stream is unknown."""
        record = self.record
        if record.total is None:
            return record.shortfall()
        epochs_left = record.cut_epochs
        if self.epoch < record.total:
            epochs_left += record.total - self.epoch - record.is_through
        return Shortfall(record.total, epochs_left, 0, 0) if epochs_left else None

    # State that survives ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training: one offset per stream and a few integers, equal on every worker; with
        `stateful` also the states of the streams."""
        place = {"epoch": self.epoch, "offsets": list(self._place.offsets), "turn": self._place.turn}
        state = {**self._identity, **place, "max_local_batch": self._layout.max_local_batch or 0}
        state["order"] = f"streams-{len(self._marks)}"  # for the sample ledger
        if self._is_ended:
            state["ended"] = 1
        state |= self.record.state_dict()
        if self._is_stateful:
            state["marks"] = [None if mark is None else list(mark) for mark in self._marks]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position.

        Args:
            state: A result of state_dict().

        Raises:
            DataError: The state belongs to other streams. Nothing is changed.
        """
        self._refuse_another(state)
        epoch, offsets, turn = state["epoch"], tuple(state["offsets"]), state["turn"]
        streams = len(self._marks)
        if epoch < 0 or len(offsets) != streams or min(offsets) < 0 or not 0 <= turn < streams:
            raise DataError(f"invalid position: epoch {epoch}, offsets {offsets}, turn {turn} of {streams} streams")
        self._begin(epoch, StreamPosition(offsets, turn), state.get("marks", ()))
        self._is_ended = bool(state.get("ended"))
        self.record.load_state_dict(state)
        if self._layout.max_local_batch is not None and state.get("max_local_batch"):  # every rank has to split alike
            self._layout = dataclasses.replace(self._layout, max_local_batch=state["max_local_batch"])
        self._restart()

    def warm_up(self) -> None:
        """Do nothing: a loader worker would have to read a stream again once its position is known."""

    def start_rehearsal(self, rank: int, size: int, is_at_tail: bool) -> int:
        """Start a rehearsal as DataLoader does. The end of an epoch is unknown here, so `is_at_tail` has no effect."""
        self._place, self._is_ended = StreamPosition((0,) * len(self._marks)), False
        self._marks = [None] * len(self._marks)
        self._rank, self._world = rank, size
        self._restart()
        low, high = even_slice(0, self._layout.global_batch_size, rank, size, self._layout.min_local_batch)
        return even_slice(low, high, 0, self._fetch_start_at(self._place).parts, self._layout.min_local_batch)[1] - low

    def close(self) -> None:
        """End the loader processes and release the streams. Iterating again starts anew. Idempotent."""
        self._prefetch.close()
        self._reader.close()
        self._restart()

    @property
    def _identity(self) -> dict[str, int | str]:
        sizes = {"streams": len(self._marks), "global_batch_size": self._layout.global_batch_size}
        return {"version": FORMAT_VERSION, "seed": self.seed, **sizes}

    def _begin(self, epoch: int, place: StreamPosition, marks: Iterable[Any]) -> None:
        """Set epoch and position of the training."""
        self.epoch, self._place, self._is_ended = epoch, place, False
        known = dict(enumerate(marks)) if self._is_stateful else {}
        self._marks = [tuple(mark) if (mark := known.get(stream)) else None for stream in range(len(place.offsets))]
        self._restart()

    def _restart(self) -> None:
        """Read on from the current position, for the current world; the current batch will be handed out again."""
        self.batch, self.indices, self._is_pending = None, [], False
        self._requests.restart(self._fetch_start_at(self._place), tuple(self._marks))

    def _fetch_start_at(self, place: StreamPosition) -> FetchStart:
        return FetchStart(self._requests.restart_id + 1, self.epoch, place, self._rank, self._world, self._layout)


def _as_it_is(batch: Any) -> Any:
    return batch


def _check(dataset: object, streams: int) -> None:
    if isinstance(dataset, Iterator):
        raise DataError(
            f"{type(dataset).__name__} is an iterator, which can be read only once; give an object whose __iter__ "
            f"returns a new iterator each time"
        )
    if not isinstance(dataset, Iterable) and not hasattr(dataset, "stream"):
        raise DataError(f"{type(dataset).__name__} needs __iter__ or stream(v, V) to be read in streams")
    if streams < 1:
        raise DataError(f"streams must be 1 or more, got {streams}")
