"""The only reader of os.environ: the settings of an agent, another launcher or the user for this process."""

from __future__ import annotations

from farandole.base.env.agent_env import (
    BALANCE as BALANCE,
    CheckpointEnv as CheckpointEnv,
    HorovodSettings as HorovodSettings,
    JobEnv as JobEnv,
    WorkerEnv as WorkerEnv,
    environment_of as environment_of,
    hide_torchrun_place as hide_torchrun_place,
    horovod_environment as horovod_environment,
    prepare_for_strict_mode as prepare_for_strict_mode,
    read_bucket_mb as read_bucket_mb,
    read_checkpoint_env as read_checkpoint_env,
    read_exit_notice as read_exit_notice,
    read_horovod_settings as read_horovod_settings,
    read_job_env as read_job_env,
    read_mkl_reproducibility as read_mkl_reproducibility,
    read_rank_and_size as read_rank_and_size,
    read_reconfigure as read_reconfigure,
    read_start_timeout_s as read_start_timeout_s,
    read_timeline as read_timeline,
    read_token as read_token,
    read_torchrun_rank_and_size as read_torchrun_rank_and_size,
    read_worker_env as read_worker_env,
    set_torchrun_world_size as set_torchrun_world_size,
    strict_environment as strict_environment,
    torchrun_environment as torchrun_environment,
)
from farandole.base.env.cluster_variables import (
    SlurmVariables as SlurmVariables,
    each_node as each_node,
    is_under_slurm as is_under_slurm,
    read_slurm_variables as read_slurm_variables,
    slurm_client_environment as slurm_client_environment,
    slurm_folder as slurm_folder,
)
from farandole.base.env.inheritance import (
    carried_environment as carried_environment,
    changed_environment as changed_environment,
    differs_for_all as differs_for_all,
    has_malloc_settings as has_malloc_settings,
    inherited_environment as inherited_environment,
    prepare_for_nccl as prepare_for_nccl,
    put_own_python_first as put_own_python_first,
    read_runtime_folder as read_runtime_folder,
    read_terminal_name as read_terminal_name,
    replace_environment as replace_environment,
)
from farandole.base.env.launchers import (
    FixedEnv as FixedEnv,
    TorchrunSettings as TorchrunSettings,
    read_fixed_env as read_fixed_env,
    read_torchrun_settings as read_torchrun_settings,
    restart_count as restart_count,
    run_name as run_name,
    uses_agent_store as uses_agent_store,
)
