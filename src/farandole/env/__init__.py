"""The only reader of os.environ: the settings of an agent, another launcher or the user for this process."""

from __future__ import annotations

from farandole.env.agent_env import (
    CheckpointEnv,
    JobEnv,
    WorkerEnv,
    read_checkpoint_env,
    read_exit_notice,
    read_job_env,
    read_token,
    read_transport,
    read_worker_env,
)
from farandole.env.env_values import environment_of
from farandole.env.horovod import (
    HorovodSettings,
    horovod_environment,
    read_horovod_settings,
    read_rank_and_size,
    read_start_timeout_s,
)
from farandole.env.inheritance import (
    carried_environment,
    changed_environment,
    differs_for_all,
    inherited_environment,
    replace_environment,
)
from farandole.env.launchers import FixedEnv, read_fixed_env, restart_count, uses_agent_store
from farandole.env.tuning import has_malloc_settings, prepare_for_nccl, read_bucket_mb, read_runtime_folder

__all__ = [
    "CheckpointEnv",
    "FixedEnv",
    "HorovodSettings",
    "JobEnv",
    "WorkerEnv",
    "carried_environment",
    "changed_environment",
    "differs_for_all",
    "environment_of",
    "has_malloc_settings",
    "horovod_environment",
    "inherited_environment",
    "prepare_for_nccl",
    "read_bucket_mb",
    "read_checkpoint_env",
    "read_exit_notice",
    "read_fixed_env",
    "read_horovod_settings",
    "read_job_env",
    "read_rank_and_size",
    "read_runtime_folder",
    "read_start_timeout_s",
    "read_token",
    "read_transport",
    "read_worker_env",
    "replace_environment",
    "restart_count",
    "uses_agent_store",
]
