"""The location of the alias `horovod`, and the case in which it must not be used. Called by the command line and the
alias itself."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from farandole.errors import ConfigError


def alias_path() -> Path:
    """Return the folder that, on PYTHONPATH, makes `import horovod` mean Farandole."""
    return Path(__file__).parent / "alias"


def refuse_beside_real_horovod() -> None:
    """Raise ConfigError when Horovod itself is installed: the alias would hide it."""
    try:
        real = metadata.distribution("horovod")
    except metadata.PackageNotFoundError:
        return
    raise ConfigError(
        f"Horovod {real.version} is installed in this Python, and Farandole's alias `horovod` would hide it: uninstall "
        "Horovod (pip uninstall horovod), or write `import farandole as hvd` and do not use the alias"
    )
