"""Who may import whom, read from the source: the direction of docs/architecture.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "farandole"

BASE = "base"  # the files directly under farandole/, and these folders
BASE_FOLDERS = {"env", "events", "liveness", "wire"}
MAY_IMPORT = {
    BASE: set(),
    "collectives": set(),
    "state": {"collectives"},
    "process_group": {"collectives"},
    "optim": {"collectives", "process_group", "state"},
    "data": {"collectives", "state"},
    "ledger": set(),
    "ray": {"launch"},
    "spark": {"launch"},
    "parallel": set(),
    "checkpoint": {"collectives", "state"},
    "sharding": {"collectives", "process_group", "state"},
    "worker": {"collectives", "process_group", "state", "optim", "data", "ledger", "checkpoint"},
    "elastic": {"collectives", "process_group", "state", "optim", "data", "worker"},
    "in_place": {"collectives", "process_group", "state", "optim", "data", "worker"},
    "frameworks": {"collectives", "state", "optim", "data", "worker", "elastic"},
    "coordinator": set(),
    "agent": set(),
    "engines": {"agent"},
    "demo": {"launch", "ledger", "testing"},  # a test that people watch
    "page": set(),
    "launch": {"agent", "coordinator", "demo", "engines", "horovod", "ledger", "checkpoint", "page"},
    "horovod": {  # other names
        "collectives",
        "state",
        "optim",
        "data",
        "worker",
        "elastic",
        "coordinator",
        "engines",
        "launch",
    },
}
WITHOUT_TORCH = {BASE, "agent", "coordinator", "engines", "launch", "ledger", "page", "ray", "spark"}
IMPURE = {"threading", "socket", "time", "os", "torch", "asyncio", "random", "subprocess"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb"}
# The folder, and the file that runs in each `import torch`, for which that folder takes too long to import.
READERS_OF_THE_DATE = {
    "agent/agent.py",  # the age of a file that a worker has just written
    "agent/preemption.py",  # cloud providers say by the date when a machine is taken away
    "checkpoint/checkpoint_writer.py",
    "collectives/named/timeline.py",
    "launch/control_client.py",
    "launch/control_commands.py",
    "launch/job_files.py",
    "launch/job_runner.py",
    "launch/job_timeline.py",  # of a file that other processes show beside other traces
    "launch/output.py",
    "launch/torchrun_output.py",
    "page/job_feed.py",
    "page/page_server.py",
    "worker/host_update_listeners.py",  # an argument of Horovod's callbacks
}
"""For display, unless a reason is given: the date of a machine may step, and those of two machines differ."""
READERS_OF_THE_ENVIRONMENT = ("env", "process_group/autoload.py")


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


def layer_of(path: Path, root: Path = ROOT) -> str:
    relative = path.relative_to(root)
    first = relative.parts[0]
    return first if len(relative.parts) > 1 and first not in BASE_FOLDERS else BASE


def violations(path: Path, root: Path = ROOT) -> list[str]:
    """What a file imports that it must not."""
    source = path.read_text()
    layer, found = layer_of(path, root), []
    is_pure = re.search(r"\bPure\b", ast.get_docstring(ast.parse(source)) or "") is not None
    for name in imports(source):
        parts = name.split(".")
        if parts[0] == "farandole" and len(parts) > 1:
            other = parts[1] if (root / parts[1]).is_dir() and parts[1] not in BASE_FOLDERS else BASE
            if other not in {layer, BASE} and other not in MAY_IMPORT[layer]:
                found.append(f"{layer} imports {name}")
        if parts[0] == "torch" and layer in WITHOUT_TORCH:
            found.append(f"{layer} imports torch")
        if parts[0] in IMPURE and is_pure:
            found.append(f"a pure file imports {name}")
    may_read = any(path.is_relative_to(root / each) for each in READERS_OF_THE_ENVIRONMENT)
    if not may_read and ENVIRONMENT & names_used(source):
        found.append("reads os.environ")
    if path.name != "machine.py" and "time" in {name.split(".")[0] for name in imports(source)}:
        found.append("reads the time")
    return found


def sources() -> list[Path]:
    """All but what is for tests, and the door of `python -m farandole`."""
    files = sorted(ROOT.rglob("*.py"))
    return [path for path in files if layer_of(path) != "testing" and path.name != "__main__.py"]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_layer_may(path: Path) -> None:
    assert violations(path) == []


def test_the_date_of_a_machine_is_for_display() -> None:
    ours = [path for path in sources() if "horovod/alias" not in path.as_posix() and path.name != "machine.py"]
    readers = {path.relative_to(ROOT).as_posix() for path in ours if "wall_time_s" in names_used(path.read_text())}
    assert readers == READERS_OF_THE_DATE
    assert [path.name for path in ours if "time" in imports(path.read_text())] == []


def test_the_table_of_the_architecture_page_is_this_one() -> None:
    page = (ROOT.parents[1] / "docs" / "architecture.md").read_text()
    rows = {
        name: set(re.findall(r"`(\w+)`", others)) for name, others in re.findall(r"^\| `(\w+)` \|(.*)\|$", page, re.M)
    }
    assert rows == {name: others for name, others in MAY_IMPORT.items() if name != BASE}


def test_there_are_files_to_check() -> None:
    assert len(sources()) > 50


@pytest.mark.parametrize(
    ("place", "source", "found"),
    [
        ("coordinator/a.py", "import torch", "coordinator imports torch"),
        ("coordinator/a.py", "from farandole.worker import link", "coordinator imports farandole.worker.link"),
        ("worker/a.py", "from farandole.coordinator.job import Job", "worker imports farandole.coordinator.job.Job"),
        ("state/a.py", "def f():\n    from farandole.data import loader", "state imports farandole.data.loader"),
        ("launch/a.py", "from farandole.testing import records", "launch imports farandole.testing.records"),
        ("data/a.py", '"""Order. Pure."""\nimport threading', "a pure file imports threading"),
        ("data/a.py", '"""Pure: no clock."""\nimport socket', "a pure file imports socket"),
        ("data/a.py", "import os\nx = os.environ", "reads os.environ"),
        ("launch/a.py", "import os\nx = os.getenv('A')", "reads os.environ"),
        ("data/a.py", "from os import environ as e", "reads os.environ"),
        ("env.py", "import os\nx = os.environ", "reads os.environ"),
        ("env/a.py", "from farandole.worker import link", "base imports farandole.worker.link"),
        ("data/a.py", "import time", "reads the time"),
        ("a.py", "import torch", "base imports torch"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, place: str, source: str, found: str) -> None:
    for folder in MAY_IMPORT.keys() | BASE_FOLDERS | {"testing"}:
        (tmp_path / folder).mkdir()
    (tmp_path / place).write_text(source)
    assert found in violations(tmp_path / place, tmp_path)


def test_the_folder_env_reads_the_environment_and_everyone_may_import_it(tmp_path: Path) -> None:
    for folder in ("env", "coordinator"):
        (tmp_path / folder).mkdir()
    (tmp_path / "env" / "a.py").write_text("import os\nx = os.environ")
    (tmp_path / "coordinator" / "a.py").write_text("from farandole.env.a import x")
    assert violations(tmp_path / "env" / "a.py", tmp_path) == []
    assert violations(tmp_path / "coordinator" / "a.py", tmp_path) == []


def test_imports_for_type_checkers_are_no_imports() -> None:
    assert list(imports("if TYPE_CHECKING:\n    import torch\nimport os")) == ["os"]


def test_what_is_said_in_a_comment_is_no_use_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""Never reads os.environ. Impurely."""  # os.getenv, import time\n')
    assert violations(tmp_path / "a.py", tmp_path) == []
