"""The arithmetic of this process in strict mode: deterministic operators, and a self-test whose result all workers
compare, because another processor or another version of a library may round otherwise."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import platform
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from farandole.base.env import read_mkl_reproducibility
from farandole.errors import ConfigError, StepError
from farandole.training.collectives.connection_pair import bytes_of
from farandole.training.collectives.transport import Transport
from farandole.training.state import step
from farandole.training.state.batch import GlobalBatch
from farandole.training.state.session import SESSION
from farandole.training.state.tensor_digest import digest_of

logger = logging.getLogger("farandole")


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Use deterministic operators inside the block. torch raises RuntimeError for an operator that has no such form,
    and names it."""
    was_on, was_lenient = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    options: Any = torch.utils.deterministic
    filled = options.fill_uninitialized_memory
    _use_deterministic(True, warn_only=False)
    # It only shows errors of a script that reads uninitialized memory, and costs a write of each new tensor.
    options.fill_uninitialized_memory = False
    try:
        yield
    finally:
        _use_deterministic(was_on, warn_only=was_lenient)
        options.fill_uninitialized_memory = filled


def _use_deterministic(is_on: bool, *, warn_only: bool) -> None:
    """Call torch.use_deterministic_algorithms(), which imports torch's compiler to tell it, for seconds (torch 2.13,
    torch/__init__.py): a process that compiles nothing only needs the setting itself."""
    if "torch._inductor" in sys.modules:
        torch.use_deterministic_algorithms(is_on, warn_only=warn_only)
    else:
        torch._C._set_deterministic_algorithms(is_on, warn_only=warn_only)


class Arithmetic(msgspec.Struct, frozen=True):
    """The arithmetic of a process: the SHA-256 of the self-test's results, as hexadecimal digits, and for people the
    properties on which it may depend."""

    digest: str
    text: str


def own_arithmetic() -> Arithmetic:
    """Return the arithmetic of this process, with its present number of threads."""
    return _arithmetic(torch.get_num_threads())


def refuse_others(transport: Transport) -> None:
    """Compare the arithmetic of all workers, which all call it. Raises ConfigError on those that differ from the most,
    or from the lowest rank where there is no majority. The others lose them, and continue."""
    mine = own_arithmetic()
    packed = transport.all_gather(msgspec.msgpack.encode(mine))
    received = [msgspec.msgpack.decode(each, type=Arithmetic) for each in packed]
    counts = Counter(each.digest for each in received)
    right = max(received, key=lambda each: counts[each.digest])
    if mine.digest == right.digest:
        return
    raise ConfigError(
        f"strict mode: rank {transport.rank} rounds otherwise than {counts[right.digest]} of {len(received)} workers, "
        f"so that the model would not be the same. This worker: {mine.text}; the others: {right.text}. Use machines "
        f"with the same processors and libraries, or leave strict mode"
    )


class RepeatedShards:
    """A self-test of the model: a rehearsal computes shards that are then computed again, with the same random numbers.
    Their gradients must be equal to the last bit."""

    def __init__(self) -> None:
        # Decided steps, epoch and first position of the global batch.
        self._now = self._rehearsed = (-1, -1, -1)
        self._digests: dict[tuple[int, int], int] = {}  # by shard and parameter, of the rehearsal
        self._different: list[torch.Tensor] = []

    def begin(self, global_batch: GlobalBatch) -> None:
        """Begin a global batch."""
        self._now = SESSION.run_loop.steps_decided(), global_batch.epoch, global_batch.start

    def compare(self, shard: int, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Note the gradient of a shard in a rehearsal, or compare it with the one of the rehearsal; not with that of a
        batch that is handed out behind the last one of an epoch, which has other samples."""
        key = shard, id(parameter)
        if step.is_rehearsal():
            self._rehearsed = self._now
            self._digests[key] = digest_of([gradient])
        elif self._digests:
            if self._now != self._rehearsed:
                self._digests.clear()
                return
            before = self._digests.pop(key, None)
            if before is not None and before != digest_of([gradient]):
                self._different.append(parameter)

    def refuse(self) -> None:
        """Raise StepError, with the names of parameters, where gradients differed."""
        if not self._different:
            return
        names = list(dict.fromkeys(map(step.observer().name_of, self._different)))
        self._different.clear()
        layer = layer_trace.first_difference()
        further = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise StepError(
            f"strict mode: two runs of the loop body with the same samples and random numbers gave different gradients "
            f"of {', '.join(names[:3])}{further}, in the order of backward(). {layer} It, or code before it, has an "
            f"operator with another result in each run, keeps a state of its own, or draws from a random generator of "
            f"its own: use the global one of torch, numpy or Python"
        )


class LayerTrace:
    """The outputs of all layers in a rehearsal, and when its shards are computed again."""

    def __init__(self) -> None:
        self._step = -1
        self._by_shard: dict[int, list[tuple[torch.nn.Module, int]]] = {}  # of the rehearsal
        self._now: list[tuple[torch.nn.Module, int]] = []
        self._shard = -1
        self._hook: RemovableHandle | None = None

    def begin(self, shard: int) -> None:
        """Note that the loop body gets a shard, or -1."""
        if step.is_rehearsal():
            self._step = SESSION.run_loop.steps_decided()
            self._now = self._by_shard[shard] = []
            if self._hook is None:
                self._hook = register_module_forward_hook(self._note)
        elif self._hook is not None:
            self._shard, self._now = shard, []
            if SESSION.run_loop.steps_decided() != self._step:
                self._hook.remove()
                self._hook = None
                self._by_shard.clear()

    def first_difference(self) -> str:
        """Return a sentence about the layer that was the first with another output in the second run."""
        before = self._by_shard.get(self._shard, [])
        for (layer, was), (other, now) in zip(before, self._now, strict=False):
            if layer is not other or was != now:
                name = step.observer().name_of(other)
                return f"The first layer with another output is {name} ({type(other).__name__})."
        return "All layers had the same outputs; it is the backward pass of the first of these that differs."

    def _note(self, layer: torch.nn.Module, _: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and not layer._modules:
            self._now.append((layer, digest_of([output])))


layer_trace = LayerTrace()
"""That of this process."""


def warn_of_other_arithmetic(step: int) -> None:
    """Warn that a state was made by another arithmetic."""
    logger.warning(
        "strict mode: the state of step %d was computed by another kind of processor, or with other libraries, that "
        "round otherwise: from here on the model will not be the one that these would have made. Here: %s",
        step,
        own_arithmetic().text,
    )


@functools.cache
def _arithmetic(threads: int) -> Arithmetic:
    text = ", ".join(
        (
            f"torch {torch.__version__}",
            _processor(),
            f"{torch.backends.cpu.get_cpu_capability()}",
            f"{threads} thread{'' if threads == 1 else 's'}",
            f"MKL_CBWR={read_mkl_reproducibility() or 'not set'}",
        )
    )
    return Arithmetic(_self_test(), text)


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _self_test() -> str:
    """Compute some layers forward and backward, of sizes that take different ways through the libraries."""
    found = hashlib.sha256()
    generator = torch.Generator().manual_seed(24)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").requires_grad_()

    def take(result: torch.Tensor, *inputs: torch.Tensor) -> None:
        gradients = torch.autograd.grad(result.float().square().sum(), inputs)
        for each in (result, *gradients):
            found.update(bytes_of(each).numpy().data)

    with torch.enable_grad():
        for rows, inputs, outputs in ((1, 784, 64), (5, 37, 19), (64, 512, 10), (32, 256, 256)):
            x, weight = random(rows, inputs), random(outputs, inputs)
            take(F.linear(x, weight), x, weight)
            take(F.linear(x.bfloat16(), weight.bfloat16()), x, weight)
        for channels, side in ((3, 16), (32, 8)):
            x, weight = random(2, channels, side, side), random(24, channels, 3, 3)
            take(F.batch_norm(F.conv2d(x, weight, padding=1), None, None, training=True), x, weight)
        x = random(2, 2, 24, 16)
        take(F.scaled_dot_product_attention(x, x, x, is_causal=True), x)
        for function in (torch.exp, torch.tanh, torch.sigmoid, F.gelu, F.silu, torch.log1p, torch.sin):
            x = random(1003)
            take(function(x.abs()), x)
        x = random(33, 257)
        take(F.layer_norm(x, (257,)), x)
        take(x.log_softmax(-1), x)
        x = random(100_003)
        take(x.sum().view(1), x)
        take(x.norm().view(1), x)
    return found.hexdigest()
