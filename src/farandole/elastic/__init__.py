"""fd.elastic: what a training script needs to go on while workers come and go."""

from farandole.data.loader import DataLoader
from farandole.state.torch_state import TorchState
from farandole.worker.run_loop import run

__all__ = ["DataLoader", "TorchState", "run"]
