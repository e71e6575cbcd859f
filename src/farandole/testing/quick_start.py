"""A faster start of a test's worker, in half the time: torch's optimizers do not load its compiler. Used by the tests'
scripts."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch


def without_compiler() -> None:
    """Replace the compiler. Call it before the first optimizer is created, in a script that compiles nothing.

    torch.optim imports torch._dynamo, which takes longer than torch itself, only to exclude the optimizer's functions
    from it (torch 2.13, torch/optim/optimizer.py, _use_grad_for_differentiable, and torch/_compile.py). The
    replacement leaves functions unchanged, and has no other function.
    """
    if "torch._dynamo" in sys.modules:
        return
    stand_in: Any = types.ModuleType("torch._dynamo")
    stand_in.disable = lambda function, *_, **__: function
    stand_in.graph_break = lambda: None
    # Attributes that init_process_group() and DistributedDataParallel use (torch/distributed/distributed_c10d.py and
    # torch/nn/parallel/distributed.py).
    stand_in.trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)
    stand_in.config = types.SimpleNamespace(_get_optimize_ddp_mode=lambda: "ddp_optimizer")  # used by torch 2.6
    stand_in.utils = types.SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")
    sys.modules["torch._dynamo"] = torch._dynamo = stand_in
