"""Runs the code cells of a notebook as a kernel of Jupyter does: in one namespace, on a thread whose event loop runs,
and with the value of a cell's last line printed."""

from __future__ import annotations

import ast
import asyncio
import json
import sys
import types
from pathlib import Path


async def run(notebook: Path) -> None:
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    for number, cell in enumerate(json.loads(notebook.read_text())["cells"]):
        if cell["cell_type"] == "code":
            tree = ast.parse("".join(cell["source"]))
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, f"cell {number}", "exec"), vars(module))
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), vars(module))
                if value is not None:
                    print(repr(value), flush=True)


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1])))
