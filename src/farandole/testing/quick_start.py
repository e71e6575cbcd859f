"""A test's worker starts in half the time: torch's optimizers do not load its compiler. Used by the tests' scripts."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch


def without_compiler() -> None:
    """To be called before the first optimizer is made, by a script that compiles nothing.

    torch.optim imports torch._dynamo, which takes longer than torch itself, only to tell it that it should keep out
    of the optimizer's functions. What stands in for it here leaves functions as they are, and knows nothing else.
    """
    if "torch._dynamo" in sys.modules:
        return
    stand_in: Any = types.ModuleType("torch._dynamo")
    stand_in.disable = lambda function, *_, **__: function
    stand_in.graph_break = lambda: None
    # What init_process_group() and DistributedDataParallel want of it.
    stand_in.trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)
    stand_in.config = types.SimpleNamespace(_get_optimize_ddp_mode=lambda: "ddp_optimizer")  # torch 2.6 asks here
    stand_in.utils = types.SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")
    sys.modules["torch._dynamo"] = torch._dynamo = stand_in
