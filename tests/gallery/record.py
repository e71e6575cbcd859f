"""What a worker has at its end, seen from outside: tensors and numbers by name, taken from the script's own variables
with torch alone. No line of the library has a part in it."""

from __future__ import annotations

import ast
import collections
import numbers
from pathlib import Path
from typing import Any

import torch

Flat = dict[str, Any]
_NOT_TRACKED = ("loader", "after_step", "commit_follows_step", "sampler")
STATISTICS = ("running_mean", "running_var")


def record(script: dict[str, Any], path: str) -> Flat:
    """By name: numbers, words, and lists of numbers for tensors."""
    variable, names = tracked(Path(path).read_text())
    state = script[variable]
    found: Flat = {}
    for name in names:
        _flatten(getattr(state, name), name, found)
    if hasattr(state, "step"):
        found["steps"] = int(state.step)
    loader = getattr(state, "loader", None)
    if loader is not None:
        found["epoch"], found["cursor"] = loader.epoch, loader.cursor
    return found


def tracked(source: str) -> tuple[str, list[str]]:
    """The variable that holds the state, and the names of what the script gives to it, read from its text."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        function = node.value.func
        if isinstance(function, ast.Attribute) and function.attr == "TorchState":
            names = ["model", "optimizer", *(each.arg for each in node.value.keywords if each.arg)]
            target = node.targets[0]
            assert isinstance(target, ast.Name), "a body writes `state = ...TorchState(...)`"
            return target.id, [name for name in dict.fromkeys(names) if name not in _NOT_TRACKED]
    raise ValueError("the body makes no TorchState")


def _flatten(value: Any, name: str, found: Flat) -> None:
    if isinstance(value, torch.nn.Module):
        for each in (value.named_parameters(), value.named_buffers()):
            for key, tensor in each:
                _flatten(tensor, f"{name}.{key.removeprefix('module.')}", found)
        for key, other in value.state_dict().items():
            if key.endswith("_extra_state"):
                _flatten(other, f"{name}.{key}", found)
    elif isinstance(value, torch.optim.Optimizer):
        _flatten_optimizer(value, name, found)
    elif isinstance(value, torch.Tensor):
        found[name] = value.detach().to_dense().to(torch.float64).flatten().tolist()
    elif value is None or isinstance(value, str):
        found[name] = value
    elif isinstance(value, numbers.Number):
        found[name] = value.item() if hasattr(value, "item") else value
    elif hasattr(value, "__array__"):
        found[name] = [float(each) for each in value.ravel()]
    elif isinstance(value, (set, frozenset)):
        found[name] = sorted(map(str, value))
    elif isinstance(value, dict):
        found[f"{name}.keys"] = [str(key) for key in value]
        for key, each in value.items():
            _flatten(each, f"{name}.{key}", found)
    elif isinstance(value, (list, tuple, collections.deque)):
        found[f"{name}.length"] = len(value)
        for index, each in enumerate(value):
            _flatten(each, f"{name}.{index}", found)
    elif hasattr(value, "state_dict"):
        _flatten(value.state_dict(), name, found)


def _flatten_optimizer(optimizer: torch.optim.Optimizer, name: str, found: Flat) -> None:
    place = 0
    for number, group in enumerate(optimizer.param_groups):
        for key, option in group.items():
            if key != "params" and not callable(option):
                _flatten(option, f"{name}.groups.{number}.{key}", found)
        for parameter in group["params"]:
            for key, each in optimizer.state.get(parameter, {}).items():
                _flatten(each, f"{name}.state.{place}.{key}", found)
            place += 1
