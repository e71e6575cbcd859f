"""How `import horovod.torch` in the workers comes to find Farandole. Used by arguments.py."""

from __future__ import annotations

import os


def alias_environment() -> dict[str, str]:
    """What the workers' environment needs for it, beside what they inherit: nothing where the alias is installed.
    Raises ConfigError where Horovod itself is."""
    from importlib.metadata import PackageNotFoundError, distribution  # here: few command lines need all this

    from farandole.env import inherited_environment
    from farandole.horovod import alias_path, refuse_beside_real_horovod

    refuse_beside_real_horovod()
    try:
        distribution("farandole-horovod")
    except PackageNotFoundError:
        before = inherited_environment().get("PYTHONPATH")
        return {"PYTHONPATH": os.pathsep.join([str(alias_path()), *([before] if before else [])])}
    return {}
