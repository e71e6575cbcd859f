"""Which nodes a Slurm allocation has, and how many workers each of them gets."""

from __future__ import annotations

import pytest

from farandole.base.env import read_slurm_variables
from farandole.errors import ConfigError
from farandole.integrations.slurm.slurm_allocation import allocation_of, expand_nodes, own_name, own_slots


def slots(given: int | None = None, nodes: str = "n[1-3]", **variables: str) -> dict[str, int]:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": nodes, **variables}
    return dict(allocation_of(read_slurm_variables(environ), given).slots)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("node[1-3,7]", ["node1", "node2", "node3", "node7"]),
        ("node[08-11],gpu5", ["node08", "node09", "node10", "node11", "gpu5"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
        ("a-b.c[1]x,d", ["a-b.c1x", "d"]),
    ],
)
def test_a_list_of_nodes_is_read_as_slurm_writes_it(text: str, names: list[str]) -> None:
    assert expand_nodes(text) == names


@pytest.mark.parametrize("text", ["", "n[1-", "n[a-b]", "n[1-2", "n 1", "n[]"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a list of nodes as Slurm writes it"):
        expand_nodes(text)


def test_the_users_number_of_slots_comes_first() -> None:
    assert slots(4, SLURM_NTASKS_PER_NODE="2", SLURM_GPUS_ON_NODE="8") == {"n1": 4, "n2": 4, "n3": 4}


def test_then_the_tasks_of_each_node_if_there_are_several() -> None:
    assert slots(SLURM_NTASKS_PER_NODE="2", SLURM_GPUS_ON_NODE="8") == {"n1": 2, "n2": 2, "n3": 2}


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({"SLURM_GPUS_ON_NODE": "8"}, 8),
        ({"SLURM_GPUS_PER_NODE": "4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:2,v100:1(S:0-1)"}, 3),
        ({"SLURM_NTASKS_PER_NODE": "1", "SLURM_GPUS_PER_NODE": "4"}, 4),
    ],
)
def test_then_one_slot_for_each_gpu(variables: dict[str, str], count: int) -> None:
    assert slots(**variables) == {"n1": count, "n2": count, "n3": count}


def test_then_the_tasks_that_were_asked_for() -> None:
    assert slots(SLURM_NTASKS="5", SLURM_TASKS_PER_NODE="2(x2),1") == {"n1": 2, "n2": 2, "n3": 1}


def test_the_number_of_cpus_is_no_number_of_workers() -> None:
    """Where tasks were not asked for, SLURM_TASKS_PER_NODE is that of the CPUs."""
    assert slots(SLURM_TASKS_PER_NODE="128(x3)") == {"n1": 1, "n2": 1, "n3": 1}


def test_numbers_for_other_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"SLURM_TASKS_PER_NODE=2,1 is not about the 3 nodes"):
        slots(SLURM_NTASKS="3", SLURM_TASKS_PER_NODE="2,1")


def test_outside_of_an_allocation_the_way_into_one_is_told() -> None:
    with pytest.raises(ConfigError, match="SLURM_JOB_ID is not set: submit the command with sbatch"):
        allocation_of(read_slurm_variables({}), None)


def test_a_task_of_a_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="one of 3 tasks of a Slurm step; run it once, without srun"):
        slots(SLURM_STEP_NUM_TASKS="3")


def test_an_allocation_tells_what_was_found() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "2"}
    allocation = allocation_of(read_slurm_variables(environ), None)
    assert str(allocation) == "Slurm job 7: 2 nodes (n1, n2), 2 slots on each (one for each GPU)"


def test_a_node_that_joins_has_a_name_of_its_own() -> None:
    environ = {"SLURM_JOB_ID": "12", "SLURMD_NODENAME": "n4", "SLURM_GPUS_ON_NODE": "2"}
    alone = read_slurm_variables(environ)
    task = read_slurm_variables({**environ, "SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "3"})
    assert alone is not None
    assert task is not None
    assert (own_name(alone), own_name(task), own_slots(task)) == ("n4-12", "n4-10_3", 2)


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(ConfigError, match="SLURM_GPUS_ON_NODE must be a whole number"):
        slots(SLURM_GPUS_ON_NODE="many")
