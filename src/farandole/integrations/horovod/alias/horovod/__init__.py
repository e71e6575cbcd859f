"""Horovod's names, served by Farandole: scripts that `import horovod.torch as hvd` run unchanged.

The files below this folder provide objects of Farandole under their paths and names in Horovod. Modules that have
nothing of their own are not files, but in the table of alias_importer.py.
"""

from farandole.errors import ConfigError
from farandole.integrations.horovod import alias_importer, refuse_beside_real_horovod

try:
    refuse_beside_real_horovod()
except ConfigError as error:
    raise ImportError(str(error)) from None

alias_importer.install()

from horovod.runner import run  # noqa: E402 - its imports need the importer

__version__ = "0.28.1+farandole"
"""The version of Horovod that has this interface; its local part distinguishes the two."""

__all__ = ["__version__", "run"]
