"""`import horovod` means Farandole: this file hands over to the alias package that lies in farandole.

A file and not a folder `horovod`, so that nothing of Horovod is overwritten where both are installed: Python takes the
folder, which is the real one.
"""

import sys
from importlib import util

from farandole.integrations.horovod import alias_path

_folder = alias_path() / "horovod"
_spec = util.spec_from_file_location(__name__, _folder / "__init__.py", submodule_search_locations=[str(_folder)])
# The importer hands out what is in sys.modules when this file has run: the package itself, as if found on the path.
sys.modules[__name__] = util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules[__name__])
