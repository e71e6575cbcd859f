"""Optimizer state that has come from another worker, in the host's memory."""

from __future__ import annotations

import pytest
import torch

from farandole.state.parts import load_optimizer_entry


def entry() -> dict[str, torch.Tensor]:
    return {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}


@pytest.mark.parametrize(
    ("options", "step_is_on"), [({}, "cpu"), ({"capturable": True}, "meta"), ({"fused": True}, "meta")]
)
def test_it_is_taken_over_where_torch_would_have_it(options: dict[str, bool], step_is_on: str) -> None:
    """The device is one without memory: nothing is computed here."""
    parameter = torch.zeros(2, device="meta", requires_grad=True)
    optimizer = torch.optim.Adam([parameter])
    optimizer.param_groups[0].update(options)
    load_optimizer_entry(optimizer, parameter, entry())
    assert optimizer.state[parameter]["exp_avg"].device.type == "meta"
    assert optimizer.state[parameter]["step"].device.type == step_is_on


def test_what_is_there_already_is_overwritten() -> None:
    parameter = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.Adam([parameter])
    load_optimizer_entry(optimizer, parameter, entry())
    kept = optimizer.state[parameter]["exp_avg"]
    load_optimizer_entry(optimizer, parameter, {"exp_avg": torch.full((2,), 5.0)})
    assert optimizer.state[parameter]["exp_avg"] is kept
    assert kept.tolist() == [5, 5]
    assert "step" not in optimizer.state[parameter]
