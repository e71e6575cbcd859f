"""farandole-horovod as its users install it: built, installed into a folder of its own, and used by new processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import farandole
from farandole.integrations.horovod import alias_path

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
OURS = ROOT / "farandole-horovod"
ALIAS = alias_path() / "horovod"


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that farandole-horovod was installed into."""
    folder = tmp_path_factory.mktemp("installed")
    words = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    run([sys.executable, "-m", "pip", "install", *words, "--target", str(folder), str(OURS)])
    return folder


@pytest.fixture(scope="session")
def real_horovod(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks as if Horovod itself had been installed there."""
    folder = tmp_path_factory.mktemp("real")
    (folder / "horovod").mkdir()
    (folder / "horovod" / "__init__.py").write_text("__version__ = '0.28.1'\n")
    (folder / "horovod-0.28.1.dist-info").mkdir()
    (folder / "horovod-0.28.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n"
    )
    return folder


def run(command: list[str], *path: Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command with these folders on PYTHONPATH; it must succeed."""
    done = attempt(command, *path, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done


def attempt(command: list[str], *path: Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, cwd=cwd)


def python(code: str, *path: Path, cwd: Path | None = None) -> str:
    """What this code prints, in a new process."""
    return run([sys.executable, "-c", code], *path, cwd=cwd).stdout.strip()


def test_every_way_to_import_horovod_gives_farandole(installed: Path) -> None:
    code = """
import horovod.torch as hvd
import horovod, farandole, farandole.elastic, horovod.torch.elastic, horovod.torch.mpi_ops
from horovod.common.exceptions import HorovodInternalError
from horovod.runner.common.util.env import get_env_rank_and_size
assert hvd.allreduce is horovod.torch.mpi_ops.allreduce is farandole.allreduce
assert horovod.torch.elastic.TorchState is farandole.elastic.TorchState
assert HorovodInternalError is farandole.HorovodInternalError
print(horovod.__file__, horovod.__version__, horovod.run.__module__, get_env_rank_and_size())
"""
    assert python(code, installed) == f"{ALIAS / '__init__.py'} 0.28.1+farandole horovod.runner (0, 1)"


def test_the_module_alone_has_its_names(installed: Path) -> None:
    assert python("import horovod; print(horovod.__version__, callable(horovod.run))", installed).endswith("True")
    found = "from importlib import util; print(util.find_spec('horovod.torch').origin)"
    assert python(found, installed) == str(ALIAS / "torch" / "__init__.py")


def test_what_is_pickled_by_its_name_in_horovod_is_found_again(installed: Path) -> None:
    write = "import pickle, horovod; print(pickle.dumps(horovod.run, protocol=0).decode())"
    written = python(write, installed)
    assert "horovod.runner" in written
    read = f"import pickle, sys; print(pickle.loads({written.encode() + bytes([10])!r}).__qualname__)"
    assert python(read, installed) == "run"


def test_it_is_one_package_also_where_the_alias_is_on_the_path_too(installed: Path) -> None:
    code = "import horovod.torch, horovod; print(horovod.__file__, *horovod.__path__)"
    for path in ((installed, alias_path()), (alias_path(), installed)):
        assert python(code, *path) == f"{ALIAS / '__init__.py'} {ALIAS}"


def test_a_checkout_of_horovod_in_the_working_folder_does_not_matter(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "horovod" / "docs").mkdir(parents=True)  # a folder of this name that is no package
    assert python("import horovod; print(horovod.__file__)", installed, cwd=tmp_path) == str(ALIAS / "__init__.py")


def test_pytest_finds_it(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it():\n    import horovod.torch\n")
    run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"], installed, cwd=tmp_path)


def test_horovodrun_starts_workers_that_find_it(installed: Path) -> None:
    code = "import horovod.torch as hvd; hvd.init(); print(hvd.allreduce(__import__('torch').ones(1), op=hvd.Sum))"
    done = run([str(installed / "bin" / "horovodrun"), "-np", "2", sys.executable, "-c", code], installed)
    assert sorted(done.stdout.splitlines()) == ["[0] tensor([2.])", "[1] tensor([2.])"]


def test_horovod_itself_in_the_same_folder_goes_on_working(installed: Path, real_horovod: Path, tmp_path: Path) -> None:
    both = tmp_path / "both"
    both.mkdir()
    for each in (*installed.iterdir(), *real_horovod.iterdir()):
        (both / each.name).symlink_to(each)
    assert python("import horovod; print(horovod.__version__)", both) == "0.28.1"
    done = attempt([str(installed / "bin" / "horovodrun"), "-np", "1", "true"], both)
    assert done.returncode == 2
    assert "pip uninstall horovod" in done.stderr


def test_horovod_itself_in_another_folder_is_never_hidden_silently(installed: Path, real_horovod: Path) -> None:
    done = attempt([sys.executable, "-c", "import horovod.torch"], installed, real_horovod)
    assert done.returncode == 1
    assert "ImportError: Horovod 0.28.1 is installed" in done.stderr.splitlines()[-1]


def test_both_distributions_have_one_version() -> None:
    project = (OURS / "pyproject.toml").read_text()
    versions = re.findall(r'^version = "(.+)"$|"farandole==(.+)"', project, flags=re.MULTILINE)
    assert [mine or needed for mine, needed in versions] == [farandole.__version__] * 2
    assert metadata.version("farandole") == farandole.__version__


def test_farandoles_own_distributions_hold_the_alias_but_no_module_horovod(tmp_path: Path) -> None:
    for kind in ("wheel", "sdist"):
        run([sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(tmp_path)], cwd=ROOT)
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        scripts = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"farandole"}
    assert "horovodrun" not in scripts  # that command would take the place of Horovod's
    files = {str(path.relative_to(ALIAS)) for path in ALIAS.rglob("*.py")}
    assert {f"farandole/integrations/horovod/alias/horovod/{file}" for file in files} <= set(names)
    with tarfile.open(sdist) as archive:
        inner = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/farandole/integrations/horovod/alias/horovod/{file}" for file in files} <= inner
