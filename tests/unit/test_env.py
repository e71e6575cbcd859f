"""What the environment says, read without the environment."""

from __future__ import annotations

import pytest

from farandole import env
from farandole.errors import ConfigError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-1",
}
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
}


def test_nothing_said_is_nothing_read() -> None:
    assert env.read_worker_env({}) is None
    assert env.read_fixed_env({}) is None


def test_what_an_agent_says_comes_back() -> None:
    said = env.worker_environment("@farandole-1", "w3", "secret", 2)
    assert env.read_worker_env(said) == env.WorkerEnv("@farandole-1", "w3", "secret", 2)


def test_half_of_what_an_agent_says_is_refused() -> None:
    said = env.worker_environment("@farandole-1", "w3", "secret", 2)
    del said["FARANDOLE_SECRET"]
    with pytest.raises(ConfigError, match="lacks FARANDOLE_SECRET"):
        env.read_worker_env(said)


def test_children_do_not_inherit_what_an_outer_job_said() -> None:
    said = {**env.worker_environment("@farandole-1", "w3", "secret", 2), "HOME": "/home/somebody"}
    assert env.inherited_environment(said) == {"HOME": "/home/somebody"}


@pytest.mark.parametrize(
    ("said", "launcher", "rank", "size"),
    [
        (TORCHRUN, "torchrun", 3, 4),
        (OPEN_MPI, "Open MPI's mpirun", 1, 2),
        (MPICH, "mpirun", 0, 2),
        (SRUN, "srun", 1, 2),
    ],
)
def test_each_launcher_is_understood(said: dict[str, str], launcher: str, rank: int, size: int) -> None:
    read = env.read_fixed_env(said)
    assert read is not None
    assert (read.launcher, read.rank, read.size) == (launcher, rank, size)


def test_torchruns_hosts_are_the_cross_ranks() -> None:
    read = env.read_fixed_env(TORCHRUN)
    assert read is not None
    assert (read.local_rank, read.local_size, read.cross_rank, read.cross_size) == (1, 2, 1, 2)
    assert (read.master_addr, read.master_port) == ("10.0.0.1", 29500)


def test_a_shell_of_salloc_is_no_task_of_srun() -> None:
    assert env.read_fixed_env({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None


def test_ranks_of_one_job_arrive_at_the_same_port_and_other_jobs_at_another() -> None:
    first = env.read_fixed_env(OPEN_MPI)
    second = env.read_fixed_env({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    other = env.read_fixed_env({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-2"})
    assert first is not None
    assert second is not None
    assert other is not None
    assert first.master_port == second.master_port != other.master_port


def test_several_hosts_need_an_address_to_meet_at() -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        env.read_fixed_env({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("RANK", "three", "RANK must be a whole number, got 'three'"), ("RANK", "9", "contradict each other")],
)
def test_values_that_cannot_be_are_named(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        env.read_fixed_env({**TORCHRUN, name: value})
