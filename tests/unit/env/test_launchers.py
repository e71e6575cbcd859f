"""What torchrun, mpirun and srun say, read without them."""

from __future__ import annotations

import pytest

from farandole.base import env
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
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
}


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


@pytest.mark.parametrize(
    ("said", "lacking"),
    [
        (TORCHRUN, "LOCAL_WORLD_SIZE"),
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        (MPICH, "MPI_LOCALRANKID"),
        (SRUN, "SLURM_STEP_TASKS_PER_NODE"),
    ],
)
def test_a_launcher_that_says_too_little_is_told_what_lacks(said: dict[str, str], lacking: str) -> None:
    with pytest.raises(ConfigError, match=f"lacks {lacking}"):
        env.read_fixed_env({name: value for name, value in said.items() if name != lacking})


@pytest.mark.parametrize(
    ("host", "local_rank", "rank", "local_size"), [("0", "1", "1", 2), ("2", "0", "4", 2), ("3", "0", "6", 1)]
)
def test_sruns_hosts_may_differ_in_size(host: str, local_rank: str, rank: str, local_size: int) -> None:
    said = {
        **SRUN,
        "SLURM_PROCID": rank,
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_LOCALID": local_rank,
        "SLURM_NODEID": host,
        "SLURM_STEP_NUM_NODES": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
        "MASTER_ADDR": "10.0.0.1",
    }
    read = env.read_fixed_env(said)
    assert read is not None
    assert (read.local_size, read.cross_rank, read.cross_size) == (local_size, int(host), 4)


def test_hosts_that_srun_does_not_list_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no host number 5"):
        env.read_fixed_env({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "5"})
    with pytest.raises(ConfigError, match="SLURM_STEP_TASKS_PER_NODE must be"):
        env.read_fixed_env({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "two"})


def test_what_an_allocation_asked_for_does_not_matter_to_a_step() -> None:
    """sbatch --ntasks-per-node=4, then srun -n 2: the variable is still there."""
    read = env.read_fixed_env({**SRUN, "SLURM_NTASKS_PER_NODE": "4", "SLURM_NTASKS": "8"})
    assert read is not None
    assert (read.size, read.local_size) == (2, 2)


def test_mpiruns_helper_under_slurm_is_not_taken_for_the_worker() -> None:
    """MPICH's mpirun starts one helper per host with srun; the workers inherit the helper's variables."""
    helper = {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    read = env.read_fixed_env({**helper, **MPICH, "PMI_RANK": "1", "MPI_LOCALRANKID": "1"})
    assert read is not None
    assert (read.launcher, read.rank, read.size) == ("mpirun", 1, 2)


def test_srun_that_speaks_pmi_is_still_srun() -> None:
    read = env.read_fixed_env({**SRUN, "PMI_RANK": "1", "PMI_SIZE": "2"})
    assert read is not None
    assert read.launcher == "srun"


@pytest.mark.parametrize("port", ["0", "70000", "-1"])
def test_a_port_that_cannot_be_is_named(port: str) -> None:
    with pytest.raises(ConfigError, match=f"MASTER_PORT must be between 1 and 65535, got '{port}'"):
        env.read_fixed_env({**TORCHRUN, "MASTER_PORT": port})


def test_a_port_that_nobody_named_is_below_those_that_the_kernel_gives_away() -> None:
    for said in (OPEN_MPI, MPICH, SRUN):
        read = env.read_fixed_env(said)
        assert read is not None
        assert 20_000 <= read.master_port < 32_000


def test_several_hosts_without_a_name_for_the_job_need_a_port() -> None:
    said = {**MPICH, "MPI_LOCALNRANKS": "1", "MASTER_ADDR": "10.0.0.1"}
    with pytest.raises(ConfigError, match="MASTER_PORT"):
        env.read_fixed_env(said)
