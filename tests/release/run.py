"""Builds wheel and sdist, and checks them as for a release: `make dist`.

The sdist is built from the repository, and the wheel from the sdist. twine reads both, with the page for PyPI. The
wheel is installed into an environment of its own, beside the packages of the development environment, and the demo runs
from it in an empty folder. The tools are installed into .venv-dist.
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
ENVIRONMENT = ROOT / ".venv-dist"
TOOLS = ("build==1.6.1", "twine==7.0.0")

_IMPORT = "import farandole, sys; sys.exit(0 if farandole.__file__.startswith(sys.prefix) else farandole.__file__)"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder of the distributions")
    options = parser.parse_args(arguments)
    python = environment(ENVIRONMENT)
    print("Installing build and twine into .venv-dist ...", flush=True)
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *TOOLS])
    shutil.rmtree(options.output, ignore_errors=True)
    run([python, "-m", "build", "--no-isolation", "--outdir", options.output, ROOT])
    wheel, sdist = (next(options.output.glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    run([python, "-m", "twine", "check", "--strict", wheel, sdist])
    if missing := missing_in(wheel, sdist):
        print("missing in the distributions:", *missing, sep="\n  ")
        return 1
    with tempfile.TemporaryDirectory(prefix="farandole-dist-") as folder:
        return try_wheel(wheel, Path(folder))


def missing_in(wheel: Path, sdist: Path) -> list[str]:
    """Return the files of the package that the wheel lacks, and the files that the sdist lacks."""
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    with zipfile.ZipFile(wheel) as archive:
        found = {*archive.namelist()}
    missing = [f"{wheel.name}: {path}" for path in files if str(path.relative_to(PACKAGE.parent)) not in found]
    with tarfile.open(sdist) as packed:
        found = {name.partition("/")[2] for name in packed.getnames()}
    wanted = [*files, *(ROOT / name for name in ("README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"))]
    return missing + [f"{sdist.name}: {path}" for path in wanted if str(path.relative_to(ROOT)) not in found]


def try_wheel(wheel: Path, folder: Path) -> int:
    """Install the wheel into a new environment, and run its commands in an empty folder. Return the demo's result."""
    python = environment(folder / "venv")
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", wheel])
    place = folder / "empty"
    place.mkdir()
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run([python, "-c", _IMPORT], cwd=place, env=clean)
    run([python.parent / "farandole", "--version"], cwd=place, env=clean)
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
