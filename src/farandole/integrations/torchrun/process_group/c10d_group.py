"""The process group for c10d and the libraries built upon it; its methods have c10d's names.

registration.py makes the groups. c10d_collectives.py carries the operations out, works.py has their results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed import ProcessGroup, ReduceOp

from farandole.errors import ConfigError, RecoverableError
from farandole.integrations.torchrun.process_group import c10d_collectives, monitored_barrier, works
from farandole.integrations.torchrun.process_group.autoload import BACKEND
from farandole.integrations.torchrun.process_group.c10d_collectives import contiguous, require_dense
from farandole.integrations.torchrun.process_group.reconfigurable import NamedMembers, WorldsByHandles
from farandole.integrations.torchrun.process_group.works import Done, GroupMembers, Receiving, alone_in
from farandole.training.collectives.connection_pair import as_bytes, byte_view
from farandole.training.collectives.transport import Transport

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName  # a NewType of str, only since torch 2.10

Tensors = Sequence[torch.Tensor]


class FarandoleGroup(ProcessGroup):
    """A group whose members may change: rank and size are read at each call.

    In a job the coordinator changes them; in a group that was created for it, reconfigure() does.

    An operation runs when it is called, in the calling thread, in the order of the calls, which is the same on all
    ranks. It raises RecoverableError (PeerLost, GenerationEnded) when another worker was lost, and so does every later
    one of that generation; its output is undefined then. CollectiveMismatch means that ranks disagree.

    Args:
        members: Who is in the group, and the way to them.
        timeout: The time limit, a timedelta, of operations that name no other one. Not in a job.

    Examples:
        >>> fd.init(default_group=True)
        >>> torch.distributed.get_world_size()  # of the default group, which is one of these
        1
    """

    def __init__(self, members: GroupMembers, timeout: timedelta | None = None) -> None:
        super().__init__(members.rank, members.size)  # type: ignore[call-arg]  # the stub lacks this form
        self.members = members
        self._name, self._description = "", "undefined"
        self._operations = 0
        self._barriers = monitored_barrier.BarrierCount()
        self._timeout = timeout

    # Identity ------------------------------------------------------------------------------------------------
    #
    # C++ calls the names in mixed case, Python the others.

    def getRank(self) -> int:  # noqa: N802
        return self.members.rank

    def getSize(self) -> int:  # noqa: N802
        return self.members.size

    def rank(self) -> int:
        return self.members.rank

    def size(self) -> int:
        return self.members.size

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def name(self) -> str:
        return BACKEND

    def _get_backend_name(self) -> str:
        return BACKEND

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    @property
    def group_name(self) -> GroupName:
        return cast("GroupName", self._name)

    @property
    def group_desc(self) -> str:
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(each) for each in devices]

    def _get_backend(self, device: torch.device) -> FarandoleGroup:  # type: ignore[override]
        """Return the group itself: there is no backend between a group and its transport."""
        return self

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __repr__(self) -> str:
        return f"<FarandoleGroup {self._name!r} of {self.size()} ranks>"

    # Reductions ----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors | torch.Tensor, opts: Any = ReduceOp.SUM, timeout: Any = None) -> Done:
        tensors = _several(tensors)
        return self._do(
            "all_reduce",
            tensors,
            lambda transport: c10d_collectives.all_reduce(transport, tensors, _op(opts)),
            _limit(opts, timeout),
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = ReduceOp.SUM) -> Done:
        return self.allreduce(tensors, opts)

    def reduce(
        self, tensors: Tensors | torch.Tensor, opts: Any = 0, op: Any = ReduceOp.SUM, timeout: Any = None
    ) -> Done:
        tensors, root = _several(tensors), _root(opts)
        kind = getattr(opts, "reduceOp", op)
        return self._do(
            "reduce",
            tensors,
            lambda transport: c10d_collectives.reduce(transport, tensors, kind, root),
            _limit(opts, timeout),
        )

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = ReduceOp.SUM, timeout: Any = None) -> Done:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]

        def carry_out(transport: Transport) -> None:
            for output, each in zip(outputs, inputs, strict=True):
                c10d_collectives.reduce_scatter(transport, output, each, _op(opts))

        return self._do("reduce_scatter", outputs, carry_out, _limit(opts, timeout))

    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = ReduceOp.SUM) -> Done:
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = ReduceOp.SUM) -> Done:
        def carry_out(transport: Transport) -> None:
            for output, whole in zip(outputs, inputs, strict=True):
                c10d_collectives.reduce_scatter_single(transport, output, whole, _op(opts))

        return self._do("reduce_scatter", outputs, carry_out, _limit(opts))

    # Data movement -------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors | torch.Tensor, opts: Any = 0, timeout: Any = None) -> Done:
        tensors = _several(tensors)
        return self._do(
            "broadcast",
            tensors,
            lambda transport: c10d_collectives.broadcast(transport, tensors, _root(opts)),
            _limit(opts, timeout),
        )

    def allgather(  # type: ignore[override]  # the stub knows two forms
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> Done:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]

        def carry_out(transport: Transport) -> None:
            for each, mine in zip(outputs, inputs, strict=True):
                c10d_collectives.all_gather(transport, each, mine)

        written = [each for several in outputs for each in several]
        return self._do("all_gather", written, carry_out, _limit(opts, timeout))

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Done:
        """Gather several tensors: `outputs[r][i]` is tensor number i of rank r."""
        return self.allgather(list(zip(*outputs, strict=True)), inputs, opts)

    def all_gather_single(self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> Done:
        return self.all_gather_single_coalesced([output], [mine], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Done:
        def carry_out(transport: Transport) -> None:
            for output, mine in zip(outputs, inputs, strict=True):
                c10d_collectives.all_gather_single(transport, output, mine)

        return self._do("all_gather", outputs, carry_out, _limit(opts))

    def gather(self, outputs: Any, inputs: Any, opts: Any = 0, timeout: Any = None) -> Done:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = ([outputs] if outputs else []), [inputs]

        def carry_out(transport: Transport) -> None:
            for number, mine in enumerate(inputs):
                c10d_collectives.gather(transport, outputs[number] if outputs else [], mine, _root(opts))

        written = [each for several in outputs for each in several]
        return self._do("gather", written, carry_out, _limit(opts, timeout))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = 0, timeout: Any = None) -> Done:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], ([inputs] if inputs else [])

        def carry_out(transport: Transport) -> None:
            for number, output in enumerate(outputs):
                c10d_collectives.scatter(transport, output, inputs[number] if inputs else [], _root(opts))

        return self._do("scatter", outputs, carry_out, _limit(opts, timeout))

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Done:
        return self._do(
            "all_to_all",
            outputs,
            lambda transport: c10d_collectives.all_to_all(transport, outputs, inputs),
            _limit(opts),
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        whole: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Done:
        def carry_out(transport: Transport) -> None:
            c10d_collectives.all_to_all_single(transport, output, whole, output_splits, input_splits)

        return self._do("all_to_all", [output], carry_out, _limit(opts))

    def barrier(self, opts: Any = None, timeout: Any = None) -> Done:  # type: ignore[override]
        return self._do("barrier", [], lambda transport: transport.barrier(), _limit(opts, timeout))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until every rank has called it, as Gloo's groups do.

        Args:
            timeout: How long rank 0 waits; None: as long as for other operations of the group.
            wait_all_ranks: The error names all missing ranks, and not only the first one.

        Raises:
            CollectiveMismatch: At rank 0: some ranks have not called it in time; at the others: rank 0 had this error.
        """
        if self.size() == 1 or works.is_completed_after_a_loss(self.members):
            self.barrier()
            return
        self._operations += 1
        chosen = self._timeout if timeout is None or timeout < timedelta() else timeout
        try:
            p2p, ranks, group = self.members.p2p("monitored_barrier")
            subject = self._barriers.next_subject(p2p, group)
            if self.rank() == 0:
                monitored_barrier.lead(p2p, ranks, subject, chosen, wait_all_ranks)
            else:
                with self.members.worlds.limit("monitored_barrier", self._timeout):
                    monitored_barrier.follow(p2p, ranks, subject)
        except RecoverableError as error:
            works.LAST_FAILURE.remember(error)
            raise

    # Point to point ------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> Done:
        """Send a message. Returns when it is on its way: the tensor may be changed."""
        self._operations += 1
        try:
            p2p, ranks, group = self.members.p2p("send")
            for tensor in tensors:
                p2p.send(ranks[target], _subject(group, tag), byte_view(as_bytes(contiguous(tensor))))
        except RecoverableError as error:
            works.LAST_FAILURE.remember(error)
            raise
        return Done(tensors)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Receiving:
        return self._receive(tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Receiving:
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Tensors, source: int | None, tag: int) -> Receiving:
        if len(tensors) != 1:
            raise ValueError(f"recv: one tensor at a time, got {len(tensors)}")
        require_dense(tensors[0])
        self._operations += 1
        p2p, ranks, group = self.members.p2p("recv")
        expected = p2p.expect(None if source is None else ranks[source], _subject(group, tag))
        return Receiving(self.members.worlds, p2p, expected, tensors[0], ranks)

    # Reconfiguration, as torch 2.14 defines it ---------------------------------------------------------------

    @property
    def supports_reconfigure(self) -> bool:
        """Whether reconfigure() may be called.

        False in a job, whose coordinator decides about the members, unless the group was created with
        init_process_group(enable_reconfigure=True).
        """
        return self._reconfigurable() is not None

    def get_reconfigure_handle(self) -> str:
        """Return what the other members need to reach this process. Only members may learn it: it proves membership."""
        return self._require_reconfigurable("get_reconfigure_handle").handle

    def reconfigure(self, opts: Any) -> Done:
        """Connect to exactly the given members. All of them call it with the same options; it returns when all have.

        Subgroups end with it. See WorldsByHandles.reconfigure() for the errors.

        Args:
            opts: torch's ReconfigureOptions. Hints have no effect.
        """
        worlds = self._require_reconfigurable("reconfigure")
        worlds.reconfigure(opts.uuid, opts.handles, opts.timeout)
        return Done()

    def _reconfigurable(self) -> WorldsByHandles | None:
        members = self.members
        return members.worlds if isinstance(members, NamedMembers) and members.may_change else None

    def _require_reconfigurable(self, op: str) -> WorldsByHandles:
        worlds = self._reconfigurable()
        if worlds is None:
            raise ConfigError(
                f"{op}: the members of this group do not change by reconfigure(); it has to be created with "
                f'init_process_group("{BACKEND}", enable_reconfigure=True)'
            )
        return worlds

    # Earlier names of c10d -----------------------------------------------------------------------------------

    def _allgather_base(self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> Done:
        return self.all_gather_single(output, mine, opts)

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Done:
        return self.all_gather_single_coalesced(outputs, inputs, opts)

    def _reduce_scatter_base(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = ReduceOp.SUM) -> Done:
        return self.reduce_scatter_single(output, whole, opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = ReduceOp.SUM) -> Done:
        return self.reduce_scatter_single_coalesced(outputs, inputs, opts)

    def alltoall_base(
        self,
        output: torch.Tensor,
        whole: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Done:
        return self.all_to_all_single(output, whole, output_splits, input_splits, opts)

    # Other methods that c10d calls ---------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Close the group for destroy_process_group()."""
        self.members.close()

    def abort(self) -> None:
        """End the group. A group that reconfigure() may change is usable again after that."""
        self.members.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of later operations. In a job it has no effect: the coordinator decides which workers are
        alive."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def get_error(self) -> object:
        """Return SUCCESS, as Gloo does: a failed operation raises its error."""
        return torch._C._distributed_c10d.ErrorType.SUCCESS

    def _start_coalescing(self, device: torch.device) -> None:
        """Do nothing: operations still run one by one."""

    def _end_coalescing(self, device: torch.device) -> Done:
        return Done()

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: operations are counted from 0 anyway."""

    def _get_sequence_number_for_group(self) -> int:
        return self._operations

    def _do(
        self, op: str, written: Tensors, carry_out: Callable[[Transport], None], timeout: timedelta | None = None
    ) -> Done:
        self._operations += 1
        try:
            transport, worlds = self.members.transport(op), self.members.worlds
            limit = worlds.limit(op, timeout or self._timeout)
            with torch.no_grad(), alone_in(transport, op, worlds), limit:
                carry_out(transport)
        except RecoverableError as error:
            works.LAST_FAILURE.remember(error)
            raise
        return Done(written)


def _several(tensors: Tensors | torch.Tensor) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _subject(group: bytes, tag: int) -> bytes:
    """Return the subject of messages; those of collectives begin with 16 bytes of a digest."""
    return b"message " + group + tag.to_bytes(8, "big", signed=True)


def _op(opts: Any) -> ReduceOp:
    """Return the operator of the options, which may be the operator itself: both forms exist."""
    return getattr(opts, "reduceOp", opts)  # type: ignore[no-any-return]


def _limit(opts: Any, timeout: timedelta | None = None) -> timedelta | None:
    """Return the time limit of one operation; None where the call names none, which options show as a negative one."""
    chosen = timeout or getattr(opts, "timeout", None)
    return chosen if chosen is not None and chosen >= timedelta() else None


def _root(opts: Any) -> int:
    return int(getattr(opts, "rootRank", opts))
