"""The only reader of os.environ: the settings of an agent, another launcher or the user for this process."""

from __future__ import annotations

from farandole.env.agent_env import (
    WorkerEnv,
    budget_environment,
    page_environment,
    read_detection_budget_s,
    read_exit_notice,
    read_page,
    read_sample_ledger,
    read_scratch_folder,
    read_token,
    read_transport,
    read_worker_env,
    sample_ledger_environment,
    scratch_environment,
    transport_environment,
    worker_environment,
)
from farandole.env.checkpoint_env import CheckpointEnv, checkpoint_environment, read_checkpoint_env
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
    "WorkerEnv",
    "budget_environment",
    "carried_environment",
    "changed_environment",
    "checkpoint_environment",
    "differs_for_all",
    "has_malloc_settings",
    "horovod_environment",
    "inherited_environment",
    "page_environment",
    "prepare_for_nccl",
    "read_bucket_mb",
    "read_checkpoint_env",
    "read_detection_budget_s",
    "read_exit_notice",
    "read_fixed_env",
    "read_horovod_settings",
    "read_page",
    "read_rank_and_size",
    "read_runtime_folder",
    "read_sample_ledger",
    "read_scratch_folder",
    "read_start_timeout_s",
    "read_token",
    "read_transport",
    "read_worker_env",
    "replace_environment",
    "restart_count",
    "sample_ledger_environment",
    "scratch_environment",
    "transport_environment",
    "uses_agent_store",
    "worker_environment",
]
