"""What torch is told before it makes a process group of NCCL's."""

from __future__ import annotations

from farandole.base.env import prepare_for_nccl


def test_a_failed_communicator_does_not_end_the_process() -> None:
    environ: dict[str, str] = {}
    assert prepare_for_nccl(environ) == ""
    assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"


def test_what_the_user_has_set_stays() -> None:
    environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_NCCL_BLOCKING_WAIT": "0"}
    assert prepare_for_nccl(environ) == ""
    assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


def test_waits_that_nobody_can_end_are_refused() -> None:
    assert "TORCH_NCCL_BLOCKING_WAIT=1" in prepare_for_nccl({"TORCH_NCCL_BLOCKING_WAIT": "1"})
