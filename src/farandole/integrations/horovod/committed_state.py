"""The states of a commit, and what a sync makes of them.

A TorchState under the commit rule, adapted to a sync: all ranks copy from the rank with the newest commit.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from farandole.base.membership import Progress
from farandole.integrations.horovod.state_handlers import (
    BUILT_IN,
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StatefulHandler,
    StateHandler,
)
from farandole.integrations.horovod.torch_state import TorchState
from farandole.training.collectives.transport import Transport
from farandole.training.state.optimizer_state import OptimizerState
from farandole.training.state.packed_metadata import pack_metadata, refuse_other_model
from farandole.training.state.packing import Packed
from farandole.training.state.sync import SyncReport, synchronize

HandlerT = TypeVar("HandlerT", bound=StateHandler)


def can_be_staged(state: TorchState) -> bool:
    """Return whether no handler or state overrides sync(). Only classes count, since the answer must be equal on all
    ranks."""
    return type(state).sync is TorchState.sync and all(type(each) in BUILT_IN for each in state._handlers.values())


def synchronize_commits(shared: CommittedState, transport: Transport, bootstrap: bool) -> SyncReport:
    """Make the state of all ranks equal to the source's, and make this state the commit of all ranks. Raises PeerLost
    or GenerationEnded with this rank's state unharmed."""
    records = []
    if recorded := shared.recorded():
        records = transport.all_gather(pickle.dumps((shared.is_holder, recorded)))
    shared.capture()
    report = synchronize(shared, transport, bootstrap)
    shared.unite([states for is_holder, states in map(pickle.loads, records) if is_holder])
    shared.settle()
    return report


class CommittedState:
    """The live values of a TorchState, divided into parts for a sync, and assembled again. The *tensors* of a state are
    those that an optimizer can change: parameters and the optimizers' tensors. Metadata is the rest."""

    digests = None
    """Absent: a script may change its state in any way between two commits."""

    def __init__(self, state: TorchState) -> None:
        self.state = state
        self._captured = Packed(b"", [])
        self.is_holder = False

    @property
    def progress(self) -> Progress:
        """Progress by the number of the last commit. Later changes do not count: they are undone, or equal on all
        ranks."""
        return Progress(step=self.state._commits)

    def settle(self) -> None:
        """Make the live values the commit, after a sync."""
        self.state._remember()

    # Samplers --------------------------------------------------------------------------------------------

    def samplers(self) -> dict[str, Any]:
        """Return the samplers that record progress, by name."""
        return {name: handler.value for name, handler in self._of(SamplerStateHandler).items()}

    def take_news(self) -> bytes:
        """Return the samples of this rank's samplers that no other rank knows of, pickled; usually b""."""
        news = {name: each.take_news() for name, each in self._with_news()}
        return pickle.dumps(news) if any(news.values()) else b""

    def add_news(self, payload: bytes) -> None:
        """Add the samples that take_news() has returned on another rank."""
        if payload:
            news = pickle.loads(payload)
            for name, sampler in self._with_news():
                sampler.add_news(news.get(name, ()))

    def _with_news(self) -> list[tuple[str, Any]]:
        return [(name, each) for name, each in self.samplers().items() if hasattr(each, "take_news")]

    def recorded(self) -> dict[str, dict[str, Any]]:
        """Return the records of this rank's samplers, by name."""
        return {name: dict(handler.value.state_dict()) for name, handler in self._of(SamplerStateHandler).items()}

    def unite(self, records: Sequence[dict[str, dict[str, Any]]]) -> None:
        """Load the source's record, which is live now, with the sets of all holders. The source does so too, since the
        remaining samples are divided among the new world then."""
        for name, handler in self._of(SamplerStateHandler).items():
            handler.load_united([handler.value.state_dict(), *(states[name] for states in records)])

    # Metadata -----------------------------------------------------------------------------------------

    def capture(self) -> None:
        self._captured = pack_metadata(self._metadata())

    def captured(self) -> Packed:
        return self._captured

    def load_metadata(self, metadata: Mapping[str, Any]) -> None:
        state = self.state
        for name, handler in self._of(ModelStateHandler).items():
            handler.value.load_state_dict(metadata["buffers"][name], strict=False)
        for each in self._optimizers():
            each.load_options(metadata["groups"])
        for name, stateful in self._stateful().items():
            stateful.value.load_state_dict(metadata["stateful"][name])
        for name, value in metadata["values"].items():
            setattr(state, name, value)
        state._commits = metadata["commits"]

    def _metadata(self) -> dict[str, Any]:
        return {
            "commits": self.state._commits,
            "buffers": {name: _others(handler.value) for name, handler in self._of(ModelStateHandler).items()},
            "groups": {name: groups for each in self._optimizers() for name, groups in each.options().items()},
            "stateful": {name: handler.value.state_dict() for name, handler in self._stateful().items()},
            "values": self.state._values(),
        }

    def _stateful(self) -> dict[str, StateHandler]:
        return {**self._of(SamplerStateHandler), **self._of(StatefulHandler)}

    # Tensors -----------------------------------------------------------------------------------------

    def live_tensors(self) -> dict[str, Any]:
        entries = {name: entry for each in self._optimizers() for name, entry in each.entries().items()}
        return {"parameters": self._parameters(), "optimizer": entries}

    def load_tensors(self, tensors: Mapping[str, Any]) -> None:
        ours = self._parameters()
        refuse_other_model(ours, tensors["parameters"])
        self.state._copies.finish()
        with torch.no_grad():
            for name, parameters in ours.items():
                for key, parameter in parameters.items():
                    parameter.copy_(tensors["parameters"][name][key])
        for each in self._optimizers():
            each.load(tensors["optimizer"])

    def _parameters(self) -> dict[str, dict[str, torch.Tensor]]:
        return {name: dict(handler.value.named_parameters()) for name, handler in self._of(ModelStateHandler).items()}

    def _optimizers(self) -> list[OptimizerState]:
        return [OptimizerState(name, handler.value) for name, handler in self._of(OptimizerStateHandler).items()]

    def _of(self, kind: type[HandlerT]) -> dict[str, HandlerT]:
        return {name: each for name, each in self.state._handlers.items() if isinstance(each, kind)}


def _others(module: torch.nn.Module) -> dict[str, Any]:
    """Return the state_dict() without the parameters: buffers, and entries that modules add to it."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {key: value for key, value in module.state_dict().items() if key not in parameters}
