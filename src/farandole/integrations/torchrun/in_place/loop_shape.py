"""The shape of the script's loop over its batches: whether it ends when they end, or counts them. training.py asks.

A loop that counts its batches takes each with next(), and nothing around that call handles their end:

    batches = iter(loader)
    for number in range(len(loader)):
        batch = next(batches)

A batch that comes again after a fault uses up one of the counted calls, and the last batch of the epoch is never taken.
Loops that end with their batches have room for it: `for batch in loader`, also by way of enumerate(), a progress bar, a
generator or a class with `__next__`; and next() where StopIteration is handled, or with a default; but not where the
handler begins anew in a `for` loop that goes on. The frames that ask for a batch, and the source of their files, tell
one from the other.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import inspect
import linecache
import sys
from functools import lru_cache
from itertools import islice, pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from farandole.integrations.torchrun.in_place.script_frames import frames_of_script
from farandole.integrations.torchrun.in_place.script_objects import line_of_script
from farandole.training.state import step
from farandole.training.state.step import StepStatus

_FARANDOLE = f"{Path(sys.modules['farandole'].__file__ or '').parent}/"
COLLECTS = (
    "what takes the batches collects something of each, also of those that come again: write `for batch in loader`, "
    "and append it to a list"
)
"""What is said of line_that_collects()."""

_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")  # functions of their own, up to Python 3.11
_UNPACKING = ("LIST_EXTEND", "SET_UPDATE", "UNPACK_SEQUENCE", "UNPACK_EX", "CALL_FUNCTION_EX")
_COLLECTING = ast.ListComp | ast.SetComp | ast.DictComp
_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef | ast.Module

Range = tuple[int, int, int, int]
"""First line, first column, last line, last column of an expression."""


def line_that_counts() -> str:
    """Return file and line of the next() that takes a batch now, if nothing handles the end of the batches there; empty
    if something does, or if there is no source to tell it from. A generator of Farandole has to call it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_FARANDOLE):
        frame = frame.f_back
    return _line_that_counts(frame)


def _line_that_counts(frame: FrameType | None) -> str:
    """Follow the end of the batches from frame to frame, outwards, as StopIteration would go."""
    line, iterates = "", True  # the frame iterates over the batches itself; else it has called a function that does
    while frame is not None:
        nodes = _nodes_at(frame)
        if iterates and not nodes:
            return ""
        ends = not _is_call_of_next(nodes[-1]) if iterates else False
        if ends or any(_handles_end(*each) and not _counts_on(nodes, each[0]) for each in pairwise(nodes)):
            if not frame.f_code.co_flags & inspect.CO_GENERATOR:
                return ""
            line, iterates = "", True  # this generator ends with the batches: how is it iterated over?
        else:
            line = line or f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            if frame.f_code.co_flags & inspect.CO_GENERATOR:
                return line  # a generator that StopIteration leaves fails (PEP 479)
            iterates = frame.f_code.co_name == "__next__"
        frame = frame.f_back
    return line


def line_that_collects() -> str:
    """Return file and line of what takes the batches now, if it is no loop: a comprehension, or a function such as
    list(), sum() or max(), which have what they have collected for themselves; else nothing. Farandole has to call
    it."""
    inner = frame = sys._getframe()
    while frame is not None and (_is_passed_over(frame) or frame.f_code.co_flags & inspect.CO_GENERATOR):
        inner, frame = frame, frame.f_back  # type: ignore[assignment]
    is_asked = inner.f_code.co_name == "__next__" or inner.f_code.co_flags & inspect.CO_GENERATOR
    if frame is None or not is_asked:
        return ""
    code, place = frame.f_code.co_code, frame.f_lasti
    while code[place] == 0:  # Python 3.12 stands in the cache behind an instruction that has entered a generator
        place -= 2
    nodes, operation = _nodes_at(frame), dis.opname[code[place]]
    if operation == "FOR_ITER":
        collects = frame.f_code.co_name in _COMPREHENSIONS or any(isinstance(each, _COLLECTING) for each in nodes[-3:])
    elif operation in ("CALL", "CALL_KW"):
        collects = bool(nodes) and not (isinstance(nodes[-1], ast.Call) and _is_next(nodes[-1]))
    else:
        collects = operation in _UNPACKING
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if collects else ""


def _is_passed_over(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    # contextlib runs a generator, too, and takes no batches.
    return file.startswith(_FARANDOLE) or frame.f_code.co_name == "__next__" or file == contextlib.__file__


def loop_variables() -> set[str]:
    """Return the names, as script_search.py has them, of the variables of all `for` loops of the script that are around
    the one over its batches: of epochs, or of folds. As far as there is a source to tell it from."""
    found = set()
    for frame in frames_of_script():
        path = "" if frame.f_code.co_name == "<module>" else f"{frame.f_code.co_qualname}()."
        for outer, inner in pairwise(_nodes_at(frame)):
            if isinstance(outer, ast.For) and inner in outer.body:
                found |= {f"{path}{each.id}" for each in ast.walk(outer.target) if isinstance(each, ast.Name)}
    return found


def _is_call_of_next(node: ast.AST) -> bool:
    """Return whether the expression raises StopIteration at the end of the batches: next(), without a default."""
    return (
        isinstance(node, ast.Call) and _is_next(node) and (isinstance(node.func, ast.Attribute) or len(node.args) == 1)
    )


def _is_next(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr == "__next__"
    return isinstance(call.func, ast.Name) and call.func.id == "next"


def _handles_end(outer: ast.AST, inner: ast.AST) -> bool:
    """Return whether `outer` handles a StopIteration that leaves `inner`, which it contains. It has to name it: a
    handler of any Exception is often that of a whole program."""
    if isinstance(outer, ast.Try):
        return inner in outer.body and any(_names_end(each.type) for each in outer.handlers)
    if isinstance(outer, ast.With):
        return inner in outer.body and any(_names_end(each.context_expr) for each in outer.items)
    return False


def _counts_on(nodes: list[ast.AST], handling: ast.AST) -> bool:
    """Return whether the `try` among the nodes is in a `for` loop, which goes on with its next turn after the end of
    the batches."""
    outer = nodes[: nodes.index(handling)]
    loop = next((each for each in reversed(outer) if isinstance(each, ast.For | ast.AsyncFor | ast.While)), None)
    if not isinstance(handling, ast.Try) or not isinstance(loop, ast.For | ast.AsyncFor):
        return False
    leaves = (ast.Break, ast.Return, ast.Raise)
    return not all(isinstance(each.body[-1], leaves) for each in handling.handlers if _names_end(each.type))


def _names_end(node: ast.AST | None) -> bool:
    return node is not None and any(
        isinstance(each, ast.Name) and each.id == "StopIteration" for each in ast.walk(node)
    )


def _nodes_at(frame: FrameType) -> list[ast.AST]:
    """Return the nodes around the expression that a frame evaluates, outermost first, within its function; none where
    that is not known."""
    code = frame.f_code
    first, last, start, end = next(islice(code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    tree = _tree_of(code.co_filename)
    if tree is None or first is None or last is None or start is None or end is None:
        return []
    return _path_to(tree, (first, start, last, end))


def _path_to(tree: ast.Module, place: Range) -> list[ast.AST]:
    path: list[ast.AST] = [tree]
    while inner := next((each for each in _children(path[-1]) if _contains(each, place)), None):
        path.append(inner)
    if not _is_at(path[-1], place):
        return []
    scope = max(number for number, each in enumerate(path) if isinstance(each, _SCOPES))
    return path[scope:]


def _children(node: ast.AST) -> list[ast.AST]:
    """Return the children that have a place; those of children without one (arguments, comprehensions) in their
    stead."""
    children: list[ast.AST] = []
    for child in ast.iter_child_nodes(node):
        children += [child] if hasattr(child, "lineno") else _children(child)
    return children


def _range_of(node: Any) -> Range:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _contains(node: ast.AST, place: Range) -> bool:
    first, start, last, end = _range_of(node)
    return (first, start) <= place[:2] and place[2:] <= (last, end)


def _is_at(node: ast.AST, place: Range) -> bool:
    return hasattr(node, "lineno") and _range_of(node) == place


@lru_cache(maxsize=16)
def _tree_of(filename: str) -> ast.Module | None:
    lines = linecache.getlines(filename)
    try:
        return ast.parse("".join(lines)) if lines else None
    except SyntaxError:  # the file has changed since it was imported
        return None


def reason_in_batches(batches_of_step: int, taken: int) -> str:
    """Return the reason why the job has to become static, as far as it shows when the script asks for another batch
    than the first one of an iteration; empty: there is none.

    Args:
        batches_of_step: The batches whose gradients the script adds up in a step; 0: not known yet.
        taken: The batches that the script has taken in this iteration.
    """
    if taken == 1 and (line := line_that_counts()):
        return (
            f"{line}: next() of the training loader is in a loop that counts its batches, and would end an epoch "
            f"too early when a batch comes again (write `for batch in loader`)"
        )
    if not batches_of_step and step.status() is StepStatus.OPEN and not step.is_noticed():
        return f"{line_of_script()}: the script takes a batch of its training loader before the last one is trained"
    return ""
