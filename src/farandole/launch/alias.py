"""The import path through which `import horovod.torch` in the workers finds Farandole. Used by arguments.py."""

from __future__ import annotations

import os


def alias_environment() -> dict[str, str]:
    """Return the variables that the workers' environment needs for it, beside the inherited ones: none where the alias
    is installed. Raises ConfigError where Horovod itself is."""
    from importlib.metadata import PackageNotFoundError, distribution  # here: few command lines need it

    from farandole.env import inherited_environment
    from farandole.horovod import alias_path, refuse_beside_real_horovod

    refuse_beside_real_horovod()
    try:
        distribution("farandole-horovod")
    except PackageNotFoundError:
        before = inherited_environment().get("PYTHONPATH")
        return {"PYTHONPATH": os.pathsep.join([str(alias_path()), *([before] if before else [])])}
    return {}
