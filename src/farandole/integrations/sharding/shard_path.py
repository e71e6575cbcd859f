"""From gradient to step with divided modules: each worker has the gradients of its shard, and steps when all workers
have those of the shard that they mirror, too."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed import ReduceOp
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin

from farandole.errors import RecoverableError, StepError
from farandole.integrations.torchrun.process_group import c10d_collectives
from farandole.training.collectives import world
from farandole.training.collectives.transport import NOTHING
from farandole.training.collectives.transport_choice import host_transport
from farandole.training.optim.loader_path import GradientStatus
from farandole.training.optim.optimizer_mixin import STEPPED_TWICE, at_end_of_pass
from farandole.training.optim.step_agreement import (
    StepHeader,
    Weights,
    absorb,
    conclude,
    conclude_alone,
    header_of,
    packed_at_end,
)
from farandole.training.state import step
from farandole.training.state.batch import Batch
from farandole.training.state.session import SESSION

if TYPE_CHECKING:
    from farandole.integrations.sharding.elastic_shards import ElasticShards

_DIGESTS = struct.Struct("<QQ")

Gradients = list[torch.Tensor | None]


class Ready(NamedTuple):
    """A step that is not taken.

    own, mirrored  the gradients of the own part, and of the mirrored one
    steps          decided steps before it
    options        of the optimizer's groups; empty while the step may go on
    """

    own: Gradients
    mirrored: Gradients
    steps: int
    options: Sequence[dict[str, Any]] = ()


class ShardPath:
    """The gradients of one optimizer, whose parameters FSDP2 has divided."""

    def __init__(self, shards: ElasticShards) -> None:
        self._shards = shards
        self._batch: Batch | None = None
        self._weights = Weights("mean")
        self._pass_is_open = False
        self._arrivals = Counter[int]()  # of gradients in this batch, by id of the parameter
        self.is_broken = False  # a collective of this generation has failed in the current step
        self._ready: Ready | None = None
        step.add_losses(False)
        self.forget()

    def forget(self) -> None:
        self._status = GradientStatus.LOCAL
        self._weights.forget()
        self._arrivals.clear()

    # Passes ----------------------------------------------------------------------------------------------

    def notice(self, batch: Batch) -> None:
        last, self._batch = self._batch, batch
        if batch is not last:
            self.forget()
            self._ready = None
            self._pass_is_open = False
            step.take_part(self)

    def open_pass(self, arrived: torch.Tensor | None = None) -> float:
        """Note that gradients of the current batch arrive. Returns their factor; that of a mean where there is no
        batch. `arrived`: a parameter that has its gradient."""
        batch = step.batch() if step.is_undecided() else None
        if batch is None:
            return 1.0 / world.current().placement.size
        if batch is not self._batch:
            self._shards.refuse_left(arrived)
        self.notice(batch)
        if arrived is not None:
            self._arrivals[id(arrived)] += 1
        if not self._pass_is_open:
            if self._status is not GradientStatus.LOCAL and not step.is_aborted():
                raise StepError(
                    "a second backward pass for the same batch before optimizer.step() with a model that is divided "
                    "among workers: add the losses, and call backward() once"
                )
            step.begin_pass(batch)
            self._factor = self._weights.record(batch)
            self._pass_is_open = True
            # Behind the callbacks of all roots, which may reduce something in them.
            at_end_of_pass(lambda: at_end_of_pass(self._close_pass))
        return self._factor

    def _close_pass(self) -> None:
        self._pass_is_open = False
        batch = self._batch
        if batch is not None and not step.is_aborted():
            self._conclude(batch)

    def _conclude(self, batch: Batch) -> None:
        """Agree on the step with all workers: its gradients are those of the global batch then."""
        self._status = GradientStatus.REDUCED
        transport = world.current().transport
        try:
            if transport.size == 1:
                conclude_alone(batch)
                step.mark_reduced()
                return
            header = header_of(batch, self._shards.plan_digest, self._weights.header_weight())
            trailers = transport.all_reduce(NOTHING, packed_at_end(header))
            factor = conclude([StepHeader.unpack(each) for each in trailers], batch)
        except RecoverableError:
            if not self.fail():
                raise
            return
        if factor != 1.0:  # of fd.weight()
            self._refuse_direct()
            for gradient in self._shards.gradients():
                if gradient is not None:
                    gradient.mul_(factor)
        step.mark_reduced()

    def _refuse_direct(self) -> None:
        """Raise StepError for gradients that came twice in a batch: once from FSDP2, and once without it."""
        if max(self._arrivals.values(), default=0) > 1:
            raise StepError(
                "fd.weight() and a loss that uses parameters directly, as by full_tensor(), with a model that "
                "fully_shard() has divided: the direct part would get the weight of the other one. Leave fd.weight() "
                "out, or the direct part, such as for weight_decay= of the optimizer"
            )

    def fail(self) -> bool:
        """Abort the step, since a collective has failed. Returns whether the loader can repeat the batch."""
        self.is_broken = True
        return absorb()

    # Calls of the optimizer ------------------------------------------------------------------------------

    def end_body(self, batch: Batch) -> None:
        """Do nothing: there are no micro-batches."""

    def reduce_rest(self, batch: Batch) -> None:
        self.notice(batch)
        if step.is_aborted():
            self._shards.drop_gradients()  # not earlier: the loop body may clip them
            return
        if self._status is GradientStatus.LOCAL:
            raise StepError(
                "optimizer.step() without gradients of this batch: a model that fully_shard() has divided reduces them "
                "in backward(), unless model.set_requires_gradient_sync(False) was called before"
            )
        if not step.is_aborted() and self._status is GradientStatus.REDUCED:
            self._give_to_mirror()

    def _give_to_mirror(self) -> None:
        """Give the final gradients to the worker that mirrors them. No worker steps before all have those that they
        mirror."""
        shards, transport = self._shards, world.current().transport
        if transport.size == 1:
            return
        shards.refuse_changed()
        own = shards.gradients()
        try:
            self._ready = Ready(own, shards.exchange(own), SESSION.run_loop.steps_decided())
            trailers = transport.all_reduce(NOTHING, _DIGESTS.pack(*shards.digests()))
        except RecoverableError:
            self._interrupt()
            if not absorb():
                raise
            return
        digests = [_DIGESTS.unpack(each) for each in trailers]
        for rank, (own_digest, _) in enumerate(digests):
            if own_digest != digests[shards.mirrored_by[rank]][1]:
                shards.refuse_optimizer(rank)

    def _interrupt(self) -> None:
        """Keep what the step needs, since other workers may take it: the script has gradients and options again."""
        self.is_broken = True
        if self._ready is not None:
            self._ready = self._ready._replace(options=self._shards.options())
        self._shards.drop_gradients()

    def take_decided(self) -> Ready | None:
        """Return the step that was interrupted here, if other workers have taken it and this worker's state is that
        behind it."""
        is_decided = self._ready is not None and self._ready.steps < SESSION.run_loop.steps_decided()
        return self._take_ready() if is_decided else None

    def _take_ready(self) -> Ready | None:
        ready, self._ready = self._ready, None
        return ready

    def begin_world(self) -> None:
        """Note that the workers have regrouped: no collective of this world has failed."""
        self.is_broken, self._ready = False, None

    def refuse_second_step(self) -> None:
        if self._status is GradientStatus.APPLIED:
            raise StepError(STEPPED_TWICE)

    def refuse_unplanned(self) -> None:
        """Do nothing: the optimizer compares its parameters with those of its modules."""

    def applied(self) -> None:
        self._status = GradientStatus.APPLIED
        self._shards.stepped(self._take_ready())

    def tensors(self) -> list[torch.Tensor]:
        return [each for each in self._shards.gradients() if each is not None]

    def begin_zeroing(self, batch: Batch) -> bool:
        self.notice(batch)
        self._pass_is_open = False
        if self._status is GradientStatus.REDUCED and not step.is_aborted():
            step.drops_reduced(batch)
        return True

    def zeroed(self) -> None:
        """Do nothing: gradients of FSDP2 are new tensors in each pass."""

    def begin_micro_batch(self) -> None:
        """Do nothing: there are none."""

    def begin_padding(self) -> None:
        """Do nothing: there are none."""

    def end_overlap(self, reason: str) -> None:
        """Do nothing: nothing runs in the background."""


class Gathering(DefaultAllocMixin, AllGather):
    """All-gathers of parameters. A failed one leaves zeros, and aborts the step."""

    def __init__(self, path: ShardPath) -> None:
        self._path = path

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None:
        is_in_step = step.is_undecided()
        if is_in_step and self._path.is_broken:
            output_tensor.zero_()
            return
        try:
            transport = host_transport(world.current().transport)
            c10d_collectives.all_gather_single(transport, output_tensor, input_tensor)
        except RecoverableError:
            if not (is_in_step and self._path.fail()):
                raise
            output_tensor.zero_()


class Reducing(DefaultAllocMixin, ReduceScatter):
    """Reduce-scatters of gradients, weighted by the workers' shares of the global batch."""

    def __init__(self, path: ShardPath) -> None:
        self._path = path

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        factor, is_in_step = self._path.open_pass(), step.is_undecided()
        if is_in_step and self._path.is_broken:
            output_tensor.zero_()
            return
        input_tensor.mul_(factor) if factor else input_tensor.zero_()
        try:
            transport = host_transport(world.current().transport)
            c10d_collectives.reduce_scatter_single(transport, output_tensor, input_tensor, ReduceOp(ReduceOp.SUM))
        except RecoverableError:
            if not (is_in_step and self._path.fail()):
                raise
            output_tensor.zero_()
