"""fd.elastic: the names that a training script needs to continue while workers come and go."""

from farandole.integrations.horovod.host_update_listeners import notification_manager
from farandole.integrations.horovod.object_state import ObjectState, State
from farandole.integrations.horovod.run_fn import run_fn
from farandole.integrations.horovod.sampler import ElasticSampler
from farandole.integrations.horovod.state_handlers import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
    get_handler_registry,
    set_handler_registry,
)
from farandole.integrations.horovod.torch_state import TorchState
from farandole.training.data.eval_loader import EvalLoader
from farandole.training.data.grouped_order import Bucketed, ShardLocal, Stratified, Weighted
from farandole.training.data.loader import DataLoader
from farandole.training.data.sample_order import Sequential, Shuffled
from farandole.training.data.stream_loader import StreamLoader
from farandole.training.state.metrics_file import MetricsReader
from farandole.training.state.session import HostUpdateResult
from farandole.training.state.step_state import StepState
from farandole.training.state.tracker import MetricsWriter, Tracker
from farandole.training.worker.run_loop import run

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
