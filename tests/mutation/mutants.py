"""Mutants: one-line faults in a source file, as replacements of parts of its text. Used by run.py."""

from __future__ import annotations

import ast
import difflib
import re
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
_NEGATED_BY_A_SWAP = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_LOGGERS = ("logger", "logging", "_logger", "warnings")


@dataclass(frozen=True)
class Mutant:
    """One fault. `start` and `end` are offsets in bytes of the part of the source that `text` replaces."""

    path: str
    line: int
    function: str
    """The qualified name of the innermost function that contains it; "" at the level of a module or class."""
    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        data = source.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()

    def diff(self, source: str) -> str:
        """Return the lines that change, each with - or + in front of it."""
        lines = difflib.unified_diff(source.splitlines(), self.apply(source).splitlines(), n=0, lineterm="")
        return "\n".join(line for line in list(lines)[2:] if not line.startswith("@@"))


def find_mutants(path: str, source: str) -> list[Mutant]:
    """Return all mutants of a source file, in the order of its lines."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return sorted(finder.found, key=lambda mutant: (mutant.line, mutant.start, mutant.text))


class _Finder(ast.NodeVisitor):
    """Collects mutants. It leaves out what no test should have to notice: annotations, logging and the words of error
    messages."""

    def __init__(self, path: str, source: str) -> None:
        self.found: list[Mutant] = []
        self._path = path
        self._data = source.encode()
        self._line_starts = [0]
        for line in self._data.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))
        self._names: list[str] = []  # of the functions and classes around
        self._function = ""

    # Statements -----------------------------------------------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        outer, self._function = self._function, ".".join([*self._names, node.name])
        self._names += [node.name, "<locals>"]
        self._visit_body(node.body)
        del self._names[-2:]
        self._function = outer

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - ast's name for it

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._names.append(node.name)
        self._visit_body(node.body)
        self._names.pop()

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self._condition(node.test)
            self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if not isinstance(call, ast.Call) or self._is_logging(call):
            return  # a docstring, a yield
        self._remove(node)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._remove(node)
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            if isinstance(node.target, ast.Attribute):
                self._remove(node)
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._remove(node)
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            if not (isinstance(node.value, ast.Constant) and node.value.value in (None, False)):
                self._replace(node.value, "None")
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._remove(node)

    def visit_Break(self, node: ast.Break | ast.Continue | ast.Delete) -> None:
        self._remove(node)

    visit_Continue = visit_Delete = visit_Break  # noqa: N815

    # Expressions ----------------------------------------------------------------------------------------------------

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._condition(test)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        was, becomes = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._operator(left, right, rf"\b{was}\b", becomes)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            self._operator(left, right, *_COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._replace(node, self._text(node.operand))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_text = any(isinstance(each, ast.JoinedStr) or _is_string(each) for each in (node.left, node.right))
        if isinstance(node.op, ast.Add | ast.Sub) and not is_text:
            was, becomes = (r"\+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
            self._operator(node.left, node.right, was, becomes)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value))
        elif isinstance(node.value, int):
            self._replace(node, str(node.value + 1))

    def visit_Call(self, node: ast.Call) -> None:
        if self._is_logging(node):
            return
        if isinstance(node.func, ast.Name) and node.func.id in _CALLS:
            self._replace(node.func, _CALLS[node.func.id])
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave out the text of messages."""

    # Help -----------------------------------------------------------------------------------------------------------

    def _visit_body(self, body: list[ast.stmt]) -> None:
        for each in body:
            self.visit(each)

    def _condition(self, test: ast.expr) -> None:
        is_done = isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], _NEGATED_BY_A_SWAP)
        if not is_done and not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            self._replace(test, f"not ({self._text(test)})")

    def _remove(self, node: ast.stmt) -> None:
        self._replace(node, "pass")

    def _operator(self, left: ast.expr, right: ast.expr, was: str, becomes: str) -> None:
        between = self._data[self._end(left) : self._start(right)].decode()
        for found in list(re.finditer(was, between))[:1]:
            start = self._end(left) + len(between[: found.start()].encode())
            self._add(left, start, start + len(found.group()), becomes)

    def _replace(self, node: ast.expr | ast.stmt, text: str) -> None:
        self._add(node, self._start(node), self._end(node), text)

    def _add(self, node: ast.expr | ast.stmt, start: int, end: int, text: str) -> None:
        self.found.append(Mutant(self._path, node.lineno, self._function, start, end, text))

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        return self._data[self._start(node) : self._end(node)].decode()

    def _is_logging(self, call: ast.Call) -> bool:
        return isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) in _LOGGERS


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
