"""Horovod's names, served by Farandole: scripts that `import horovod.torch as hvd` run unchanged.

Every file below this folder is thin: it provides objects of Farandole under their paths and names in Horovod.
"""

from farandole.errors import ConfigError
from farandole.integrations.horovod import refuse_beside_real_horovod

try:
    refuse_beside_real_horovod()
except ConfigError as error:
    raise ImportError(str(error)) from None

from horovod.runner import run

__version__ = "0.28.1+farandole"
"""The version of Horovod that has this interface; its local part distinguishes the two."""

__all__ = ["__version__", "run"]
