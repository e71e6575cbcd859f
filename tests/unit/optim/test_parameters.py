"""On which devices parameters may be."""

from __future__ import annotations

import pytest
import torch

from farandole.errors import ConfigError
from farandole.training.optim.step_agreement import check_devices

pytestmark = pytest.mark.core


def test_parameters_on_several_devices_are_refused_with_the_first_that_is_elsewhere() -> None:
    here, there = torch.zeros(2), torch.zeros(3, device="meta")
    with pytest.raises(ConfigError, match=r"b of shape \(3,\) is on meta, .* are on cpu, meta; a worker trains on one"):
        check_devices({here: "a", there: "b"})


def test_parameters_without_memory_are_refused() -> None:
    with pytest.raises(ConfigError, match="a of shape"):
        check_devices({torch.zeros(3, device="meta"): "a"})


def test_parameters_on_one_device_are_fine() -> None:
    check_devices({torch.zeros(2): "a", torch.zeros(3): "b"})
    check_devices({})
