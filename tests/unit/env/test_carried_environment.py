"""What of an environment goes with a job to other machines."""

from __future__ import annotations

import pytest

from farandole.base import env


def test_a_user_s_settings_are_carried() -> None:
    said = {"OMP_NUM_THREADS": "2", "HOROVOD_FUSION_THRESHOLD": "0", "PYTHONPATH": "/src", "LANG": "C.UTF-8", "LR": "1"}
    said |= {"TOKENIZERS_PARALLELISM": "false", "KEYS_PER_BATCH": "2"}
    assert env.carried_environment(said) == said


@pytest.mark.parametrize(
    "name",
    ["PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR", "CUDA_VISIBLE_DEVICES", "HOSTNAME", "SSH_AUTH_SOCK", "SLURM_JOB_ID"],
)
def test_what_belongs_to_this_machine_is_not_carried(name: str) -> None:
    assert env.carried_environment({name: "x"}) == {}


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "PGPASSWORD", "GOOGLE_APPLICATION_CREDENTIALS"]
)
def test_what_looks_like_a_secret_is_not_carried(name: str) -> None:
    assert env.carried_environment({name: "x"}) == {}


def test_nothing_of_an_outer_job_is_carried_nor_its_token() -> None:
    assert env.carried_environment({"FARANDOLE_TOKEN": "t" * 64, "FARANDOLE_SLOT": "1", "HOROVOD_RANK": "0"}) == {}
    assert env.inherited_environment({"FARANDOLE_TOKEN": "t" * 64}) == {}
