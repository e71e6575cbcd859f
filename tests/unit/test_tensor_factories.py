"""Tensors that Farandole makes are where it needs them, and of the dtype that it needs: a script may have called
torch.set_default_device() or torch.set_default_dtype(), before or after a worker imports a module of ours."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "farandole"
_WITH_DTYPE = {"zeros", "empty", "ones", "empty_strided"}
_FACTORIES = {*_WITH_DTYPE, "full", "tensor", "as_tensor", "arange", "rand", "randn", "randint", "randperm", "linspace"}


def lacking(tree: ast.AST) -> list[tuple[int, str]]:
    """Return the lines in which a factory of torch leaves device or dtype to the script's defaults."""
    found = []
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("torch."):
            name = ast.unparse(call.func).removeprefix("torch.")
            named = {each.arg for each in call.keywords}
            needed = {"device"} | ({"dtype"} if name in _WITH_DTYPE else set())
            if name in _FACTORIES and None not in named and needed - named:
                found.append((call.lineno, name))
    return found


def test_factories_name_device_and_dtype() -> None:
    files = [each for each in SOURCE.rglob("*.py") if "demo" not in each.parts]
    found = {each.name: lacking(ast.parse(each.read_text())) for each in files}
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert lacking(ast.parse("torch.zeros(2, device=here)")) == [(1, "zeros")]
