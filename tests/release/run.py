"""Builds wheel and sdist of both distributions, and checks them as for a release: `make dist`.

The sdists are built from the repository, and the wheels from the sdists. twine reads all of them, with the page for
PyPI. The wheels are installed into an environment of its own, beside the packages of the development environment; there
the alias is imported, and the demo runs in an empty folder. The tools are installed into .venv-dist.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "farandole"
ALIAS = ROOT / "farandole-horovod"
ENVIRONMENT = ROOT / ".venv-dist"
TOOLS = ("build==1.6.1", "twine==7.0.0")

_IMPORT = "import farandole, sys; sys.exit(0 if farandole.__file__.startswith(sys.prefix) else farandole.__file__)"
_IMPORT_ALIAS = "import horovod.torch as hvd, farandole; assert hvd.allreduce is farandole.allreduce"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder of the distributions")
    options = parser.parse_args(arguments)
    python = environment(ENVIRONMENT)
    print("Installing build and twine into .venv-dist ...", flush=True)
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *TOOLS])
    shutil.rmtree(options.output, ignore_errors=True)
    for place in (ROOT, ALIAS):
        run([python, "-m", "build", "--no-isolation", "--outdir", options.output, place])
    wheels, sdists = (sorted(options.output.glob(pattern), key=str) for pattern in ("*.whl", "*.tar.gz"))
    run([python, "-m", "twine", "check", "--strict", *wheels, *sdists])
    (wheel, sdist), (alias_wheel, alias_sdist) = (
        [next(path for path in paths if path.name.startswith(f"{name}-")) for paths in (wheels, sdists)]
        for name in ("farandole", "farandole_horovod")
    )
    missing = missing_in(wheel, sdist, package_files(), PACKAGE.parent, ROOT)
    missing += missing_in(alias_wheel, alias_sdist, [ALIAS / "horovod.py"], ALIAS, ALIAS)
    if missing:
        print("missing in the distributions:", *missing, sep="\n  ")
        return 1
    with tempfile.TemporaryDirectory(prefix="farandole-dist-") as folder:
        return try_wheels([wheel, alias_wheel], Path(folder))


def package_files() -> list[Path]:
    return [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def missing_in(wheel: Path, sdist: Path, files: Sequence[Path], top: Path, project: Path) -> list[str]:
    """Return the files that a wheel lacks, and those that its sdist lacks.

    files    those of the package
    top      the folder to which their paths in the wheel are relative
    project  the folder of pyproject.toml
    """
    with zipfile.ZipFile(wheel) as archive:
        found = {*archive.namelist()}
    missing = [f"{wheel.name}: {path}" for path in files if str(path.relative_to(top)) not in found]
    missing += [] if any(name.endswith(".dist-info/licenses/LICENSE") for name in found) else [f"{wheel.name}: LICENSE"]
    with tarfile.open(sdist) as packed:
        found = {name.partition("/")[2] for name in packed.getnames()}
    texts = [project / name for name in ("README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml")]
    wanted = [*files, *(path for path in texts if path.exists())]
    return missing + [f"{sdist.name}: {path}" for path in wanted if str(path.relative_to(project)) not in found]


def try_wheels(wheels: Sequence[Path], folder: Path) -> int:
    """Install wheels into a new environment, and run their commands in an empty folder. Return the demo's result."""
    python = environment(folder / "venv")
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", *wheels])
    place = folder / "empty"
    place.mkdir()
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for words in (["-c", _IMPORT], ["-c", _IMPORT_ALIAS]):
        run([python, *words], cwd=place, env=clean)
    for command in ("farandole", "horovodrun"):
        run([python.parent / command, "--version"], cwd=place, env=clean)
    return subprocess.run([python, "-m", "farandole", "demo"], cwd=place, env=clean).returncode


def environment(folder: Path) -> Path:
    """Return the Python of an environment that also has the packages of this one. It is made if it is missing."""
    python = folder / "bin" / "python"
    if not python.exists():
        run([sys.executable, "-m", "venv", folder])
        asked = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True)
        beside = sysconfig.get_path("purelib")
        (Path(asked.stdout.strip()) / "beside.pth").write_text(f"{beside}\n")
    return python


def run(command: Sequence[object], **how: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], check=True, text=True, **how)  # type: ignore[call-overload]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
