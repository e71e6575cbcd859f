"""fd.elastic: the names that a training script needs to continue while workers come and go."""

from farandole.data.eval_loader import EvalLoader
from farandole.data.grouped_order import Bucketed, ShardLocal, Stratified, Weighted
from farandole.data.loader import DataLoader
from farandole.data.sample_order import Sequential, Shuffled
from farandole.data.sampler import ElasticSampler
from farandole.data.stream_loader import StreamLoader
from farandole.state.loop_hooks import HostUpdateResult
from farandole.state.metadata import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
    get_handler_registry,
    set_handler_registry,
)
from farandole.state.metrics_file import MetricsReader
from farandole.state.object_state import ObjectState, State
from farandole.state.step_state import StepState
from farandole.state.torch_state import TorchState
from farandole.state.tracker import MetricsWriter, Tracker
from farandole.worker.host_update_listeners import notification_manager
from farandole.worker.run_loop import run, run_fn

__all__ = [
    "Bucketed",
    "DataLoader",
    "ElasticSampler",
    "EvalLoader",
    "HostUpdateResult",
    "MetricsReader",
    "MetricsWriter",
    "ModelStateHandler",
    "ObjectState",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "Sequential",
    "ShardLocal",
    "Shuffled",
    "State",
    "StateHandler",
    "StepState",
    "Stratified",
    "StreamLoader",
    "TorchState",
    "Tracker",
    "Weighted",
    "get_handler_registry",
    "notification_manager",
    "run",
    "run_fn",
    "set_handler_registry",
]
