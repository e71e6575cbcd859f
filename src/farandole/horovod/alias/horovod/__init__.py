"""Horovod's names, served by Farandole: scripts that `import horovod.torch as hvd` run unchanged.

Every file below this folder is thin: it gives things of Farandole the place and the name that they have in Horovod.
"""

from farandole.errors import ConfigError
from farandole.horovod import refuse_beside_real_horovod

try:
    refuse_beside_real_horovod()
except ConfigError as error:
    raise ImportError(str(error)) from None

from horovod.runner import run

__version__ = "0.28.1+farandole"
"""The Horovod whose interface this is; with a local part, by which a script can tell the two apart."""

__all__ = ["__version__", "run"]
