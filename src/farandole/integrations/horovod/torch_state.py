"""TorchState: all values of a training job that must survive a change of the membership. Scripts create one.

With a loader of Farandole it is a StepState (training/state/step_state.py), which is no subclass and counts as one for
isinstance(). Without a loader it follows the commit rule, which this module implements.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from farandole.base.membership import Progress
from farandole.errors import ConfigError
from farandole.integrations.horovod.named.objects import broadcast_object
from farandole.integrations.horovod.object_state import ObjectState
from farandole.integrations.horovod.state_handlers import (
    BUILT_IN,
    LoaderHandler,
    LoaderSamplerHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    SnapshotHandler,
    StateHandler,
    handler_for,
)
from farandole.training.collectives import world
from farandole.training.state.deep_copy import BackgroundCopy, TensorPair, finish_all
from farandole.training.state.optimizer_state import refuse_shards
from farandole.training.state.session import SESSION
from farandole.training.state.step_state import StepState
from farandole.training.state.undivided_data import refuse_undivided


class TorchState(ObjectState):
    """Models, optimizers and all other values that must survive; every keyword becomes an attribute.

    With a loader of Farandole as `loader=` it is a StepState, which follows the step rule. Otherwise it follows the
    commit rule, as in Horovod.

    Under the commit rule the script calls `state.commit()` at points from which it can continue. After a fault all
    workers return to the newest commit, and the elastic function is called again.

    A torch DataLoader stays each worker's own; the progress of its sampler is kept, if the sampler records any.

    Modules, optimizers, samplers that record progress and objects with state_dict() have handlers (state_handlers.py);
    any number of each. Every other value is plain, and must support copying and pickling.

    A commit is a deep copy. Parameters of optimizers, and optimizer state, are copied while training continues: the
    copies complete before the next step() or load_state_dict(). Code that changes parameters in another way between a
    commit and the next step (`p.data.clamp_()`) should run before the commit.

    Args:
        model: The model to train.
        optimizer: The optimizer of its parameters.
        commit_follows_step: A promise, for scripts that commit in every step: no collective runs between
            optimizer.step() and commit(), nor in step() itself once it changes something (closures, Adasum). Then
            parameters of optimizers, and optimizer state, are not copied at all: until the step they are the commit,
            and after it nothing can fail before the next one. A collective in between raises StepError before it
            begins. Takes effect inside `elastic.run` only. With a sampler that agrees on the trained samples before
            each commit, copies are made all the same.
        **kwargs: Further values.

    Raises:
        ConfigError: A torch DataLoader that does not divide the data was given as `loader` in a job that may have
            several workers.

    Examples:
        ```python
        state = fd.elastic.TorchState(model, optimizer, epoch=0)


        @fd.elastic.run
        def train(state):
            while state.epoch < 3:
                optimizer.zero_grad()
                F.cross_entropy(model(torch.randn(4, 8)), torch.zeros(4).long()).backward()
                optimizer.step()
                state.epoch += 1
                state.commit()


        train(state)
        ```
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> TorchState:
        loader = kwargs.get("loader", args[2] if len(args) > 2 else None)
        if not _is_ours(loader):
            refuse_undivided(loader)
            return super().__new__(cls)
        if cls is not TorchState:
            raise ConfigError(f"{cls.__name__}(loader=...): a subclass with a loader must derive from StepState")
        return cast(TorchState, StepState(*args, **kwargs))

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        commit_follows_step: bool = False,
        **kwargs: Any,
    ) -> None:
        if "on_divergence" in kwargs:
            raise ConfigError("on_divergence needs a loader of Farandole: without one the last commit of rank 0 counts")
        self._commit_follows_step = commit_follows_step
        self._handlers: dict[str, StateHandler] = {}
        self._copies = BackgroundCopy()
        self._commits = self._remembered = 0  # commits made; those before the state that restore() returns to
        values = {}
        for name, value in {"model": model, "optimizer": optimizer, **kwargs}.items():
            handler = handler_for(value)
            if handler is None:
                values[name] = value
            else:
                refuse_shards(value.parameters() if isinstance(value, torch.nn.Module) else ())
                object.__setattr__(self, name, value)
                self._handlers[name] = handler
        self._handle_samplers_once()
        super().__init__(bcast_object=broadcast_value, get_rank=current_rank, **values)

    def __setattr__(self, name: str, value: Any) -> None:
        handlers = self.__dict__.get("_handlers", {})
        if name in handlers and name in self.__dict__:
            handlers[name].set_value(value)
        super().__setattr__(name, value)

    def commit(self) -> None:
        """Commit as State.commit() does. Ranks that have recorded samples of their own exchange them first, so that
        each commit contains all ranks' samples: otherwise those of a lost worker would be lost with it."""
        has_news = any(getattr(handler.value, "has_news", False) for handler in self._handlers.values())
        if not (has_news and SESSION.run_loop.receives_updates()):
            super().commit()
            return
        update = SESSION.run_loop.agreed_update()
        self.save()
        self._raise_if_updated(update)

    def save(self) -> None:
        """Make a commit. On a regroup, its number shows which worker has the newest commit."""
        SESSION.run_loop.committing()
        self._remember()
        self._commits = self._remembered = self._commits + 1
        SESSION.run_loop.committed()

    def keep_live(self) -> None:
        """Count the live values as a commit, without a copy: a sync follows, which makes one."""
        self._commits += 1

    def restore(self) -> None:
        self._copies.finish_to_restore()
        self._commits = self._remembered
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Make the state of all ranks equal to rank 0's, and remember it. A collective by name."""
        self._copies.finish_to_restore()  # the state to return to if a rank is lost now
        for handler in self._handlers.values():
            handler.sync()
        self._commits = self._bcast_object(self._commits)
        super().sync()

    def _how_far(self) -> Progress:
        return Progress(step=self._commits)

    def _remember(self) -> None:
        self._copies.forget()
        finish_all()
        optimized = {
            parameter.data_ptr()
            for optimizer in self._optimizers()
            for group in optimizer.param_groups
            for parameter in group["params"]
        } - {0}
        later: list[TensorPair] = []
        for handler in self._handlers.values():
            if type(handler) in BUILT_IN and isinstance(handler, SnapshotHandler):
                later += handler.begin_save(optimized)
            else:
                handler.save()
        self._keep()
        self._remembered = self._commits
        if self._commit_follows_step and not any(hasattr(each.value, "has_news") for each in self._handlers.values()):
            self._copies.postpone(later)
        else:
            self._copies.begin(later)

    def _handle_samplers_once(self) -> None:
        """Replace the handler of a loader whose sampler was given by itself, too: the sampler is kept only once."""
        given = {id(each.value) for each in self._handlers.values() if type(each) is SamplerStateHandler}
        for name, each in self._handlers.items():
            if isinstance(each, LoaderSamplerHandler) and id(each.value) in given:
                self._handlers[name] = LoaderHandler(getattr(self, name))

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [each.value for each in self._handlers.values() if isinstance(each, OptimizerStateHandler)]


TorchState.register(StepState)  # with a loader, scripts get a StepState for a TorchState


def _is_ours(loader: Any) -> bool:
    """Return whether a loader moves with the decided steps, as those of torch do not."""
    return hasattr(loader, "commit") and hasattr(loader, "set_world")


def broadcast_value(value: Any) -> Any:
    """Return rank 0's value on every rank; without communication when alone."""
    if world.current().placement.size == 1:
        return value
    return broadcast_object(value, 0)


def current_rank() -> int:
    return world.current().placement.rank
