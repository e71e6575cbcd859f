"""The only reader of os.environ: the settings of an agent, another launcher or the user for this process."""

from __future__ import annotations

from farandole.env.agent_env import (
    CheckpointEnv,
    HorovodSettings,
    JobEnv,
    WorkerEnv,
    environment_of,
    horovod_environment,
    read_checkpoint_env,
    read_exit_notice,
    read_horovod_settings,
    read_job_env,
    read_rank_and_size,
    read_start_timeout_s,
    read_token,
    read_transport,
    read_worker_env,
)
from farandole.env.inheritance import (
    carried_environment,
    changed_environment,
    differs_for_all,
    has_malloc_settings,
    inherited_environment,
    prepare_for_nccl,
    read_bucket_mb,
    read_runtime_folder,
    replace_environment,
)
from farandole.env.launchers import FixedEnv, read_fixed_env, restart_count, uses_agent_store

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
