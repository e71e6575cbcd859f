"""The settings that workers read from HOROVOD_ variables."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import MutableMapping

from farandole.integrations.horovod.horovod_settings import LOG_LEVELS, SETTINGS, Given, variables

__all__ = ["LOG_LEVELS", "set_env_from_args"]

# config_parser.HOROVOD_FUSION_THRESHOLD and so on: each name is its own value.
globals().update({setting.variable: setting.variable for setting in SETTINGS})
NCCL_IB_DISABLE = "NCCL_IB_DISABLE"


def set_env_from_args(env: MutableMapping[str, str], args: Namespace) -> MutableMapping[str, str]:
    """Set the variables for the arguments of launch.parse_args() in `env`, and return it."""
    values = {setting.name: getattr(args, setting.name, None) for setting in SETTINGS}
    env.update(variables({name: Given(value, name) for name, value in values.items() if value is not None}))
    if getattr(args, "tcp_flag", None):
        env[NCCL_IB_DISABLE] = "1"
    return env
