"""Join the graphs of the replicas to the caller's: their backward passes run in the threads of a pool.

torch's engine runs a whole CPU graph in the thread that called backward(). So each replica computes with leaves of its
own, and one node of the caller's graph stands for all replicas: it runs their backward passes at the same time, and
returns the sum of their gradients. The parameters get one gradient in each pass, and their hooks fire once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from farandole.errors import ConfigError
from farandole.integrations.data_parallel.thread_pool import ThreadPool

Tensors = list[torch.Tensor]
Gradients = Sequence["torch.Tensor | None"]

_PARALLEL_SUM_BYTES = 1 << 20  # below it, waking threads costs more than it saves


class Graph(NamedTuple):
    """The graph that one replica has computed.

    Attributes:
        masters: Tensors of the caller: parameters, and parts of the batch that need gradients.
        leaves: The tensors that the replica has used in their place.
        outs: The outputs that need gradients.
    """

    masters: Tensors
    leaves: Tensors
    outs: Tensors


def bridge(pool: ThreadPool, graphs: Sequence[Graph], is_shared: bool = False) -> list[Tensors]:
    """Return for each replica tensors equal to its `outs`, through which gradients of any order reach the masters."""
    masters = list({id(master): master for graph in graphs for master in graph.masters}.values())
    place_of = {id(master): place for place, master in enumerate(masters)}
    places = [[place_of[id(master)] for master in graph.masters] for graph in graphs]
    if not any(graph.outs for graph in graphs):
        return [[] for _ in graphs]
    flat = _Replicas.apply(_Node(pool, graphs, places, masters, is_shared), *masters)  # type: ignore[no-untyped-call]
    bridged = iter(flat)
    return [[next(bridged) for _ in graph.outs] for graph in graphs]


def traced(masters: Tensors, leaves: Tensors, outs: Tensors) -> Graph:
    """Return the graph of one replica, with only the leaves that it has used. torch calls the hooks of a parameter for
    each node that could give it a gradient. Raises ConfigError when the replica has used a tensor that needs a gradient
    and is not one of its leaves: that gradient would be lost."""
    ours = {id(leaf) for leaf in leaves}
    used = {id(out) for out in outs if out.is_leaf}
    waiting = [out.grad_fn for out in outs if out.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            if id(variable) not in ours:
                raise _foreign(variable)
            used.add(id(variable))
        elif node.name() == "CheckpointFunctionBackward":  # reentrant: the tensors that it has used are not visible
            used = ours
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    pairs = [(master, leaf) for master, leaf in zip(masters, leaves, strict=True) if id(leaf) in used]
    return Graph([master for master, _ in pairs], [leaf for _, leaf in pairs], outs)


def _foreign(variable: torch.Tensor) -> ConfigError:
    return ConfigError(
        f"forward() has used a tensor of shape {tuple(variable.shape)} that requires gradients and is neither a "
        "parameter of the module in DataParallel nor one of its inputs; register it, or pass it as an input. (A "
        "parameter or module in a plain list or a closure does not belong to the replica.)"
    )


@dataclass(eq=False)
class _Node:
    """The data of the node in the caller's graph.

    Attributes:
        graphs: None when a backward pass has freed them.
        is_shared: The graphs are also part of those of another node, whose backward pass must find them whole.
    """

    pool: ThreadPool
    graphs: Sequence[Graph] | None
    places: list[list[int]]
    masters: Tensors
    is_shared: bool


class _Replicas(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, node: _Node, *masters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.node = node
        ctx.set_materialize_grads(False)
        assert node.graphs is not None
        return tuple(out.detach() for graph in node.graphs for out in graph.outs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        node: _Node = ctx.node
        if node.graphs is None:
            raise RuntimeError(
                "Trying to backward through replicas a second time, after their graphs were freed: call backward() or "
                "autograd.grad() with retain_graph=True the first time"
            )
        incoming = iter(grads)
        of_outs = [[next(incoming) for _ in graph.outs] for graph in node.graphs]
        needed = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            return None, *_with_graph(node, node.graphs, of_outs, needed)
        # Private, but the only way to read retain_graph in backward(): torch 2.13 does so, too, in
        # torch/_functorch/_aot_autograd/runtime_wrappers.py.
        keeps = node.is_shared or torch._C._autograd._get_current_graph_task_keep_graph()
        found = node.pool.run(
            [
                partial(_pass, graph, outs, [needed[place] for place in places], keeps)
                for graph, outs, places in zip(node.graphs, of_outs, node.places, strict=True)
            ]
        )
        if not keeps:
            node.graphs = None
        return None, *_sum_in_place(node.pool, found, node.places, len(node.masters))


# One replica's pass ---------------------------------------------------------------------------------------------------


def _pass(graph: Graph, grads: Gradients, needed: Sequence[bool], keeps: bool) -> Gradients:
    """Return the gradients of the leaves, as tensors that are not shared."""
    outs = [out for out, grad in zip(graph.outs, grads, strict=True) if grad is not None]
    given = [grad for grad in grads if grad is not None]
    if not outs:
        return [None] * len(graph.leaves)
    if not all(needed):
        return [None if grad is None else grad.clone() for grad in _some(graph, outs, given, needed, keeps, False)]
    # Not autograd.grad(), which checkpoint(use_reentrant=True) refuses (torch 2.13, torch/utils/checkpoint.py,
    # CheckpointFunction.backward).
    torch.autograd.backward(outs, given, retain_graph=keeps)
    found = [leaf.grad for leaf in graph.leaves]
    for leaf in graph.leaves:
        leaf.grad = None
    return found


def _some(graph: Graph, outs: Tensors, grads: Tensors, needed: Sequence[bool], keeps: bool, creates: bool) -> Gradients:
    wanted = [leaf for leaf, is_needed in zip(graph.leaves, needed, strict=True) if is_needed]
    if not wanted:
        return [None] * len(needed)
    found = iter(torch.autograd.grad(outs, wanted, grads, retain_graph=keeps, create_graph=creates, allow_unused=True))
    return [next(found) if is_needed else None for is_needed in needed]


# The sum of all -------------------------------------------------------------------------------------------------------


def _sum_in_place(pool: ThreadPool, found: Sequence[Gradients], places: list[list[int]], count: int) -> Gradients:
    """Add all gradients into the first replica's gradient of each master, in the order of the replicas."""
    totals: list[torch.Tensor | None] = [None] * count
    more: list[tuple[torch.Tensor, torch.Tensor]] = []
    for grads, where in zip(found, places, strict=True):
        for place, grad in zip(where, grads, strict=True):
            total = totals[place]
            if total is None:
                totals[place] = grad
            elif grad is None:
                continue
            elif total.layout == grad.layout == torch.strided:
                more.append((total, grad))
            else:
                totals[place] = total + grad
    byte_count = sum(total.nbytes for total, _ in more)
    if byte_count < _PARALLEL_SUM_BYTES:
        _add(more)
    else:
        pool.run([partial(_add, pairs) for pairs in _divided(more, pool.size, byte_count)])
    return totals


def _add(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for total, grad in pairs:
            total.add_(grad)


def _divided(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], count: int, byte_count: int
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return lists of similar size in bytes; the additions of one tensor are in one list, in their order."""
    lists: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(count)]
    place_of: dict[int, int] = {}
    filled = 0
    for total, grad in pairs:
        place = place_of.setdefault(id(total), min(count - 1, filled * count // byte_count))
        lists[place].append((total, grad))
        filled += total.nbytes
    return lists


# Gradients of gradients -----------------------------------------------------------------------------------------------


def _with_graph(
    node: _Node, graphs: Sequence[Graph], of_outs: Sequence[Gradients], needed: Sequence[bool]
) -> Gradients:
    """Compute the same for backward(create_graph=True): gradients are outputs of the replicas, too, and are bridged."""
    second, tasks = [], []
    for graph, grads, places in zip(graphs, of_outs, node.places, strict=True):
        given = [grad for grad in grads if grad is not None]
        outs = [out for out, grad in zip(graph.outs, grads, strict=True) if grad is not None]
        leaves = [grad.detach().requires_grad_(grad.requires_grad) for grad in given]
        second.append((given, leaves))
        tasks.append(partial(_some, graph, outs, leaves, [needed[place] for place in places], True, True))
    found = node.pool.run(tasks)
    inner = [
        traced(
            graph.masters + [grad for grad in given if grad.requires_grad],
            graph.leaves + [leaf for leaf in leaves if leaf.requires_grad],
            [grad for grad in grads if grad is not None and grad.requires_grad],
        )
        for graph, (given, leaves), grads in zip(graphs, second, found, strict=True)
    ]
    totals: list[torch.Tensor | None] = [None] * len(node.masters)
    for grads, bridged, places in zip(found, bridge(node.pool, inner, is_shared=True), node.places, strict=True):
        new = iter(bridged)
        for place, grad in zip(places, grads, strict=True):
            if grad is None:
                continue
            grad = next(new) if grad.requires_grad else grad
            total = totals[place]
            totals[place] = grad if total is None else total + grad
    return totals
