"""Who may import whom, read from the source: the storeys of docs/architecture.md, and the direction within each."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from farandole import registry

ROOT = Path(__file__).parents[2] / "src" / "farandole"

STOREYS: dict[str, set[str]] = {
    "base": set(),
    "job": {"base"},
    "training": {"base"},
    "integrations": {"base", "job", "training"},
}
"""Job and training never meet, and neither imports an integration."""
BASE_FILES = {"errors.py", "registry.py"}  # public, or about all storeys; every other file beside the storeys is a door
MAY_IMPORT: dict[str, set[str]] = {
    "job/agent": set(),
    "job/coordinator": set(),
    "job/engines": {"agent"},
    "job/launch": {"agent", "coordinator", "engines"},
    "training/checkpoint": {"collectives", "state"},
    "training/collectives": set(),
    "training/data": {"collectives", "state"},
    "training/ledger": set(),
    "training/optim": {"collectives", "state"},
    "training/state": {"collectives"},
    "training/worker": {"collectives", "state", "optim", "data", "ledger", "checkpoint"},
    "integrations/data_parallel": set(),
    "integrations/ddp": {"torchrun"},
    "integrations/demo": set(),
    "integrations/etcd": set(),
    "integrations/frameworks": {"horovod"},
    "integrations/horovod": {"ddp", "ray", "spark"},
    "integrations/kubernetes": set(),
    "integrations/page": set(),
    "integrations/ray": set(),
    "integrations/sharding": {"horovod", "torchrun"},
    "integrations/slurm": set(),
    "integrations/spark": set(),
    "integrations/torchrun": set(),
}
"""Packages of the same storey. An integration that needs another one is to become one that does not."""
CIRCLES = {
    "integrations/torchrun/process_group/autoload.py integrations/torchrun/process_group/c10d_group.py "
    "integrations/torchrun/process_group/registration.py",
    "training/collectives/encrypted_socket.py training/collectives/sealed_records.py",
}
"""Files of a package that import one another, by name; the list can only shrink."""
WITHOUT_TORCH = {
    "base",
    "job",
    "training/ledger",
    *(f"integrations/{name}" for name in ("etcd", "kubernetes", "page", "ray", "slurm", "spark")),
}
IMPURE = {"threading", "socket", "time", "os", "torch", "asyncio", "random", "subprocess"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb"}
READERS_OF_THE_DATE = {
    "job/agent/worker_files.py",  # the age of a file that a worker has just written
    "job/agent/preemption.py",  # cloud providers say by the date when a machine is taken away
    "training/checkpoint/checkpoint_writer.py",
    "integrations/horovod/named/timeline.py",
    "job/launch/control_client.py",
    "job/launch/control_commands.py",
    "job/launch/job_files.py",
    "job/launch/job_runner.py",
    "job/launch/job_timeline.py",  # of a file that other processes show beside other traces
    "job/launch/output.py",
    "integrations/torchrun/torchrun_output.py",
    "integrations/page/job_feed.py",
    "integrations/page/page_server.py",
    "integrations/horovod/host_update_listeners.py",  # an argument of Horovod's callbacks
}
"""For display, unless a reason is given: the date of a machine may step, and those of two machines differ."""
READERS_OF_THE_ENVIRONMENT = ("base/env", "integrations/torchrun/process_group/autoload.py")


def imports(source: str) -> Iterator[str]:
    """Full names of all modules that a source imports when it runs, also inside functions."""
    tree = ast.parse(source)
    skipped = {
        id(node)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.If) and "TYPE_CHECKING" in ast.unparse(outer.test)
        for statement in outer.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def names_used(source: str) -> set[str]:
    """Attributes (`b` of `a.b`) and imported names."""
    nodes = list(ast.walk(ast.parse(source)))
    imported = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    return imported | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def place_of(parts: Sequence[str]) -> tuple[str, str]:
    """The storey of a file or module, by its path below farandole/, and its package there. Doors have no storey."""
    first = parts[0]
    if first in STOREYS:
        return first, parts[1] if len(parts) > 1 else ""
    return ("base", "") if f"{first.removesuffix('.py')}.py" in BASE_FILES else ("door", "")


def violations(path: Path, root: Path = ROOT) -> list[str]:
    """What a file imports that it must not."""
    source, relative = path.read_text(), path.relative_to(root)
    storey, package = place_of(relative.parts)
    found = []
    is_pure = re.search(r"\bPure\b", ast.get_docstring(ast.parse(source)) or "") is not None
    for name in imports(source):
        parts = name.split(".")
        if parts[0] == "farandole" and len(parts) > 1 and storey != "door":
            other, other_package = place_of(parts[1:])
            if not may_import(storey, package, other, other_package, name):
                found.append(f"{storey}/{package} imports {name}")
        if parts[0] == "torch" and (storey in WITHOUT_TORCH or f"{storey}/{package}" in WITHOUT_TORCH):
            found.append(f"{storey}/{package} imports torch")
        if parts[0] in IMPURE and is_pure:
            found.append(f"a pure file imports {name}")
    may_read = any(path.is_relative_to(root / each) for each in READERS_OF_THE_ENVIRONMENT)
    if not may_read and ENVIRONMENT & names_used(source):
        found.append("reads os.environ")
    if path.name != "machine.py" and "time" in {name.split(".")[0] for name in imports(source)}:
        found.append("reads the time")
    return found


def may_import(storey: str, package: str, other: str, other_package: str, name: str) -> bool:
    if other == "door":  # the public names, which integrations use as any script does
        return name == "farandole.__version__" or (storey == "integrations" and "testing" not in name.split("."))
    if storey == other and storey != "base":
        return other_package in {package, ""} or other_package in MAY_IMPORT[f"{storey}/{package}"]
    return other == storey or other in STOREYS[storey]


def circles(imported: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of names that import one another, directly or through others, in order."""
    reached = {name: {name} for name in imported}
    has_changed = True
    while has_changed:
        sizes = {name: len(each) for name, each in reached.items()}
        for name, others in imported.items():
            for other in others & reached.keys():
                reached[name] |= reached[other]
        has_changed = sizes != {name: len(each) for name, each in reached.items()}
    groups = {tuple(sorted(other for other in reached[name] if name in reached[other])) for name in imported}
    return sorted(list(group) for group in groups if len(group) > 1)


def imported_files() -> dict[str, set[str]]:
    """By file: the files that it imports when it runs, also inside functions."""
    files = {path.relative_to(ROOT).as_posix(): path for path in ROOT.rglob("*.py")}
    modules = {file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file for file in files}
    found: dict[str, set[str]] = {}
    for file, path in files.items():
        names = [name.removeprefix("farandole.") for name in imports(path.read_text()) if name.startswith("farandole.")]
        places = {modules.get(name) or modules.get(name.rpartition(".")[0]) for name in names}
        found[file] = {place for place in places if place is not None and place != file}
    return found


def package_of(file: str) -> str:
    return "/".join(place_of(file.split("/"))).rstrip("/")


def test_no_files_of_a_package_import_one_another() -> None:
    within = {
        file: {other for other in others if package_of(other) == package_of(file)}
        for file, others in imported_files().items()
    }
    assert {" ".join(circle) for circle in circles(within)} == CIRCLES


def test_no_packages_import_one_another() -> None:
    between: dict[str, set[str]] = {}
    for file, others in imported_files().items():
        if package_of(file) != "door":  # the public names, which integrations use, import everything
            between.setdefault(package_of(file), set()).update(map(package_of, others))
    assert circles(between) == []


def test_a_circle_is_found_through_others() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"e"}}) == [["a", "b", "c"]]


def sources() -> list[Path]:
    """All but what is for tests, the demo, which is one that people watch, and the door of `python -m farandole`."""
    files = [path.relative_to(ROOT) for path in sorted(ROOT.rglob("*.py"))]
    outside = {("testing",), ("integrations", "demo"), ("__main__.py",)}
    return [ROOT / path for path in files if path.parts[:1] not in outside and path.parts[:2] not in outside]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_layer_may(path: Path) -> None:
    assert violations(path) == []


def test_the_date_of_a_machine_is_for_display() -> None:
    ours = [path for path in sources() if "horovod/alias" not in path.as_posix() and path.name != "machine.py"]
    readers = {path.relative_to(ROOT).as_posix() for path in ours if "wall_time_s" in names_used(path.read_text())}
    assert readers == READERS_OF_THE_DATE
    assert [path.name for path in ours if "time" in imports(path.read_text())] == []


def test_the_tables_of_the_architecture_pages_are_these() -> None:
    docs = ROOT.parents[1] / "docs"
    tables = "".join(page.read_text() for page in [docs / "architecture.md", *sorted((docs / "storeys").glob("*.md"))])
    known = {**STOREYS, **MAY_IMPORT}
    rows = re.findall(r"^\| `([\w/]+)` \|([^|]*)\|", tables, re.M)
    assert {name: set(re.findall(r"`(\w+)`", others)) for name, others in rows if name in known} == known


@pytest.mark.parametrize(
    "place",
    [
        *registry.FACTORIES.values(),
        *registry.EXTENDERS.values(),
        *(p for each in registry.COMMANDS.values() for p in (each.function, each.parser)),
    ],
)
def test_what_is_registered_exists(place: str) -> None:
    assert callable(registry.part(place))


def test_there_are_files_to_check() -> None:
    assert len(sources()) > 50


@pytest.mark.parametrize(
    ("place", "source", "found"),
    [
        ("job/coordinator/a.py", "import torch", "job/coordinator imports torch"),
        (
            "job/coordinator/a.py",
            "from farandole.training.worker import link",
            "job/coordinator imports farandole.training.worker.link",
        ),
        (
            "job/coordinator/a.py",
            "from farandole.job.launch import cli",
            "job/coordinator imports farandole.job.launch.cli",
        ),
        (
            "training/worker/a.py",
            "from farandole.job.coordinator.job import Job",
            "training/worker imports farandole.job.coordinator.job.Job",
        ),
        (
            "training/state/a.py",
            "def f():\n    from farandole.training.data import loader",
            "training/state imports farandole.training.data.loader",
        ),
        (
            "training/state/a.py",
            "from farandole.integrations.ddp import module",
            "training/state imports farandole.integrations.ddp.module",
        ),
        (
            "integrations/slurm/a.py",
            "from farandole.integrations.ray import ray_engine",
            "integrations/slurm imports farandole.integrations.ray.ray_engine",
        ),
        ("training/state/a.py", "from farandole import elastic", "training/state imports farandole.elastic"),
        ("job/launch/a.py", "from farandole.testing import proof", "job/launch imports farandole.testing.proof"),
        ("training/data/a.py", '"""Order. Pure."""\nimport threading', "a pure file imports threading"),
        ("training/data/a.py", '"""Pure: no clock."""\nimport socket', "a pure file imports socket"),
        ("training/data/a.py", "import os\nx = os.environ", "reads os.environ"),
        ("job/launch/a.py", "import os\nx = os.getenv('A')", "reads os.environ"),
        ("training/data/a.py", "from os import environ as e", "reads os.environ"),
        ("base/env.py", "import os\nx = os.environ", "reads os.environ"),
        (
            "base/env/a.py",
            "from farandole.training.worker import link",
            "base/env imports farandole.training.worker.link",
        ),
        ("training/data/a.py", "import time", "reads the time"),
        ("errors.py", "import torch", "base/ imports torch"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, place: str, source: str, found: str) -> None:
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text(source)
    assert found in violations(tmp_path / place, tmp_path)


def test_the_folder_env_reads_the_environment_and_everyone_may_import_it(tmp_path: Path) -> None:
    for folder in ("base/env", "job/coordinator"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "base" / "env" / "a.py").write_text("import os\nx = os.environ")
    (tmp_path / "job" / "coordinator" / "a.py").write_text("from farandole.base.env.a import x")
    assert violations(tmp_path / "base" / "env" / "a.py", tmp_path) == []
    assert violations(tmp_path / "job" / "coordinator" / "a.py", tmp_path) == []


def test_imports_for_type_checkers_are_no_imports() -> None:
    assert list(imports("if TYPE_CHECKING:\n    import torch\nimport os")) == ["os"]


def test_what_is_said_in_a_comment_is_no_use_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""Never reads os.environ. Impurely."""  # os.getenv, import time\n')
    assert violations(tmp_path / "a.py", tmp_path) == []
