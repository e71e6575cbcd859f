"""The empty store of Farandole's groups: c10d needs a store for each group; these groups have connected without one."""

from __future__ import annotations

from datetime import timedelta
from typing import NoReturn

from torch._C._distributed_c10d import Store

from farandole.errors import ConfigError


class NoStore(Store):
    """Raises an error that says so when it is used: by groups of other backends, above all."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: no operation waits here."""

    def _refuse(self, *_: object) -> NoReturn:
        raise ConfigError(
            'torch.distributed was initialized with the backend "farandole", which has no store: no group of another '
            "backend can be made by means of it, nor can ranks be counted or awaited there. Leave `backend` out of "
            "new_group(), and unset TORCH_DIST_INIT_BARRIER"
        )


_OPERATIONS = "set get add wait check compare_set delete_key num_keys append multi_get multi_set clone"

for _name in _OPERATIONS.split(" "):
    setattr(NoStore, _name, NoStore._refuse)
