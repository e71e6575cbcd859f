"""Every public name has a docstring with its arguments, their units, its errors, and an example or the name of another
one that has the example. The reference of the site is made of them. Read from the source, without an import."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

import farandole

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PAGES = ROOT / "docs" / "python"

MODULES = {"elastic", "mpi_ops", "functions", "compression", "optimizer"}
"""Public names that are modules: of `farandole` itself, or under the names of Horovod."""

RAISE_NOTHING = {
    "Sequential Shuffled": "no arguments, and no step that can fail",
    "global_process_set HostUpdateResult notification_manager": "values",
    "Average Sum Min Max Product Adasum": "values",
    "Compression": "a namespace of classes",
    "is_initialized shutdown": "may be called at any time",
    "LabError Fault Plan why_not": "an error, values, and a question",
    "get_handler_registry set_handler_registry StateHandler ModelStateHandler OptimizerStateHandler "
    "SamplerStateHandler": "accessors and bases",
    "State ObjectState": "their methods raise",
    "failure FarandoleGroup FarandoleStrategy": "made by Farandole itself",
}
WITHOUT_ERRORS = {name for names in RAISE_NOTHING for name in names.split()}

UNITS = {
    r"timeout|cooldown|elapsed|grace": r"[Ss]econd|timedelta",
    r"_mb$": r"megabyte|MB",
    r"bytes": r"byte",
    r"mbit": r"[Mm]egabits per second",
    r"batch_size$|shard_sizes": r"[Ss]amples|As in DataLoader",
    r"^checkpoint_every$": r"30s|minutes|--checkpoint-every",
}
"""Parameters that have a unit, by their names, and how their descriptions give it."""

SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Attributes|Examples):$", re.MULTILINE)
SAME = re.compile(r"[Aa]rguments and(?: the)? errors are those of `(\w+)`")
REFERRED = re.compile(r"[Ss]ee the example of `(?:\w+\.)*(\w+)`")


@dataclass(frozen=True)
class Public:
    """A public name: the module that has it, and its definition in the source."""

    module: str
    name: str
    node: ast.AST

    @property
    def docstring(self) -> str:
        if isinstance(self.node, ast.FunctionDef | ast.ClassDef):
            return ast.get_docstring(self.node) or ""
        return textwrap.dedent(described(self.module, self.name))

    @property
    def parameters(self) -> list[str]:
        """Of a function, or of a class's constructor."""
        node = self.node
        if isinstance(node, ast.ClassDef):
            makers = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
            found = makers.get("__init__") or makers.get("__new__")
            if found is None:
                return []
            node = found
        if not isinstance(node, ast.FunctionDef):
            return []
        given = node.args
        names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        return [name for name in names if name not in ("self", "cls")]

    @property
    def same(self) -> Public | None:
        """The function that has the arguments and errors that are not described here."""
        found = SAME.search(self.docstring)
        return None if found is None else find("farandole", found[1])

    def section(self, title: str) -> str:
        """Return the text of a section of the docstring; empty if there is none."""
        parts = SECTION.split(self.docstring)
        return "\n".join(text for name, text in zip(parts[1::2], parts[2::2], strict=True) if name == title)

    @property
    def described_parameters(self) -> dict[str, str]:
        found = re.findall(r"^    \*{0,2}(\w+): (.*(?:\n(?: {5,}.*|$))*)", self.section("Args"), re.MULTILINE)
        same = {} if self.same is None else self.same.described_parameters
        return same | {name: " ".join(text.split()) for name, text in found}

    @property
    def errors(self) -> str:
        return self.section("Raises") or ("" if self.same is None else self.same.errors)


@cache
def tree_of(module: str) -> ast.Module:
    path = SOURCE.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


def assigned(node: ast.AST) -> set[str]:
    """Return the names to which a statement assigns."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def described(module: str, name: str) -> str:
    """Return the text below the assignment of a constant."""
    for node, after in pairwise(tree_of(module).body):
        if name in assigned(node) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            return str(after.value.value)
    return ""


@cache
def find(module: str, name: str) -> Public:
    """Return the definition, wherever it is imported from."""
    for node in reversed([*ast.walk(tree_of(module))]):  # the last one: overloads come before it
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name and node in tree_of(module).body:
            return Public(module, name, node)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("farandole"):
            for alias in node.names:
                if (alias.asname or alias.name) == name and node.module != module:
                    return find(node.module, alias.name)
        if name in assigned(node) and node in tree_of(module).body:
            return Public(module, name, node)
    raise LookupError(f"{module} has no {name}")


def exported(module: str) -> list[str]:
    """Return __all__ of a module that is not imported here."""
    for node in tree_of(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    raise LookupError(f"{module} has no __all__")


OTHERS = (
    "elastic",
    "ray",
    "spark",
    "sharding",
    "process_group",
    "testing.lab",
    "testing.faults",
    "frameworks.lightning",
    "frameworks.transformers",
)

PUBLIC = [
    *(("farandole", name) for name in farandole.__all__ if name not in MODULES),
    *((f"farandole.{other}", name) for other in OTHERS for name in exported(f"farandole.{other}")),
]
_CLASSES = [each.name for each in tree_of("farandole.errors").body if isinstance(each, ast.ClassDef)]
ERRORS = [("farandole.errors", name) for name in _CLASSES]


def is_error(public: Public) -> bool:
    return public.module == "farandole.errors"


def without_errors(public: Public) -> bool:
    return (
        public.name in WITHOUT_ERRORS or public.module == "farandole.training.worker.capabilities" or is_error(public)
    )


@pytest.mark.parametrize(("module", "name"), [*PUBLIC, *ERRORS])
def test_a_public_name_has_a_docstring_with_everything_that_a_reader_needs(module: str, name: str) -> None:
    public = find(module, name)
    assert public.docstring, "no docstring"
    described = public.described_parameters
    if not is_error(public):
        assert [each for each in public.parameters if each not in described] == [], "parameters that are not described"
    check_units(described)
    node = public.node
    if isinstance(node, ast.FunctionDef) and node.returns is not None and ast.unparse(node.returns) != "None":
        assert public.section("Returns") or public.docstring.startswith("Return "), "nothing says what it returns"
    assert without_errors(public) or public.errors, "no errors"
    assert has_example(public), "no example, and no name of one"


def check_units(described: dict[str, str]) -> None:
    for pattern, unit in UNITS.items():
        for each, text in described.items():
            assert not re.search(pattern, each) or re.search(unit, text), f"{each} has no unit: {text}"


def has_example(public: Public) -> bool:
    if is_error(public) or public.section("Examples"):
        return True
    referred = REFERRED.search(public.docstring)
    return referred is not None and any(
        find(module, name).section("Examples") for module, name in PUBLIC if name == referred[1]
    )


LISTED = re.compile(r"^::: (farandole\S+)\n((?:    options:\n(?:      .*\n)*)?)", re.MULTILINE)


def class_with_bases(public: Public) -> Iterator[Public]:
    """Yield a class, and the classes of Farandole from which it inherits."""
    yield public
    assert isinstance(public.node, ast.ClassDef)
    for base in public.node.bases:
        try:
            found = find(public.module, ast.unparse(base).partition("[")[0].rpartition(".")[2])
        except LookupError:
            continue
        if isinstance(found.node, ast.ClassDef) and found.node is not public.node:
            yield from class_with_bases(found)


def members_on(page: str) -> Iterator[tuple[str, str]]:
    """Yield the members of classes that a page of the reference shows, with the name of the class."""
    for path, options in LISTED.findall(page):
        public = find(*path.rsplit(".", 1))
        if not isinstance(public.node, ast.ClassDef):
            continue
        listed = re.search(r"members: (.*)", options)
        if listed is None:
            yield from ((path, name) for name in methods(public) if not name.startswith("_"))
        elif listed[1] != "false":
            yield from ((path, name) for name in listed[1].strip("[]").split(", "))


def methods(public: Public) -> dict[str, Public]:
    """Return the methods and properties that a class defines itself."""
    assert isinstance(public.node, ast.ClassDef)
    nodes = [each for each in public.node.body if isinstance(each, ast.FunctionDef)]
    return {each.name: Public(public.module, each.name, each) for each in reversed(nodes)}


MEMBERS = sorted({each for page in PAGES.glob("*.md") for each in members_on(page.read_text())})


@pytest.mark.parametrize(("path", "name"), MEMBERS)
def test_a_member_that_the_reference_shows_has_a_docstring_with_its_arguments_and_its_result(
    path: str, name: str
) -> None:
    """A page leaves out a member without a docstring, and says nothing."""
    owner = find(*path.rsplit(".", 1))
    found = next((has[name] for has in map(methods, class_with_bases(owner)) if name in has), None)
    assert found is not None, "no such method or property"
    assert found.docstring, "no docstring"
    described = found.described_parameters
    assert [each for each in found.parameters if each not in described] == [], "parameters that are not described"
    check_units(described)
    assert isinstance(found.node, ast.FunctionDef)
    is_property = any(ast.unparse(each) in ("property", "cached_property") for each in found.node.decorator_list)
    if not is_property and found.node.returns is not None and ast.unparse(found.node.returns) != "None":
        says = found.section("Returns") or found.section("Yields")
        assert says or re.match(r"Return |Yield ", found.docstring), "nothing says what it returns"


def test_every_public_name_is_on_a_page_of_the_reference() -> None:
    listed = {name for page in PAGES.glob("*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)}
    missing = {f"{module}.{name}" for module, name in [*PUBLIC, *ERRORS]} - listed
    assert {name for name in missing if name.replace("errors.", "") not in listed} == set()


def test_a_docstring_without_a_part_is_found(tmp_path: Path) -> None:
    source = '''def f(a: int, timeout: float) -> int:
    """Do it.

    Args:
        a: A number
            of two lines.

    Raises:
        ValueError: a is negative.
    """
'''
    public = Public("farandole.x", "f", ast.parse(source).body[0])
    assert public.described_parameters == {"a": "A number of two lines."}
    assert public.parameters == ["a", "timeout"]
    assert public.section("Raises").strip() == "ValueError: a is negative."
    assert not has_example(public)


def test_arguments_and_errors_are_those_of_the_function_that_a_docstring_names() -> None:
    variant = find("farandole", "grouped_allreduce_async_")
    assert variant.section("Args") == ""
    assert [name for name in variant.parameters if name not in variant.described_parameters] == []
    assert variant.described_parameters["tensors"] != find("farandole", "allreduce").described_parameters["tensor"]
    assert "NotInitialized" in variant.errors
