"""The end of a backward pass, for hooks on its gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from farandole.errors import StepError


# As hooks in torch 2.13, torch/nn/parallel/distributed.py: inside of compiled autograd the hooks are compiled, too, and
# what is raised in code that is being compiled would not arrive.
@torch._disable_dynamo  # type: ignore[attr-defined]
def at_end_of_pass(callback: Callable[[], None]) -> None:
    """Have `callback` called when the current backward() ends, on the thread that called it. Raises StepError inside of
    compiled autograd, which has no such end."""
    # It takes seconds to import, so `import torch` does not: who compiles has imported it.
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(compiled, "in_compiled_autograd_region", False):
        raise StepError(
            "compiled autograd (torch._dynamo.config.compiled_autograd) runs the hooks on gradients in a graph of its "
            "own, in which gradients cannot be reduced: leave it out; torch.compile() of the model works"
        )
    # Private, but the only hook at the end of backward(): torch 2.13 uses it in torch/nn/parallel/distributed.py.
    torch.autograd.Variable._execution_engine.queue_callback(callback)
