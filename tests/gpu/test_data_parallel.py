"""DataParallel on one device: the bits of the module itself, and torch's replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import farandole as fd
from farandole.integrations.data_parallel.dividing import divide, merge_outputs
from farandole.integrations.data_parallel.placement import ReplicaPlacement, compute_on_devices
from farandole.integrations.data_parallel.thread_pool import ThreadPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(3, 8, 3, padding=1)
    rest = (torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Flatten(), torch.nn.Linear(512, 10))
    return torch.nn.Sequential(conv, torch.nn.BatchNorm2d(8), *rest).to(DEVICE)


def results(model: Any, module: torch.nn.Module, autocast: bool = False) -> list[torch.Tensor]:
    """Return output, loss, gradients and buffers of a step, whose images are in the host's memory."""
    torch.manual_seed(1)
    images, classes = torch.randn(16, 3, 8, 8), torch.randint(0, 10, (16,))
    with torch.autocast("cuda", torch.float16, enabled=autocast):
        output = model(images if isinstance(model, fd.DataParallel) else images.to(DEVICE))
        loss = F.cross_entropy(output, classes.to(DEVICE))
    loss.backward()
    gradients = [each.grad for each in module.parameters()]
    return [output.detach(), loss.detach(), *gradients, *(each.clone() for each in module.buffers())]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("arguments", [{}, {"device_ids": [0]}, {"device_ids": ["cuda"], "output_device": "cuda"}])
def test_a_module_on_one_device_computes_the_same_bits(arguments: dict[str, Any], autocast: bool) -> None:
    if not arguments and torch.cuda.device_count() > 1:
        pytest.skip("the default is all devices, and there are several")
    module, wrapped = net(), net()
    expected = results(module, module, autocast)
    found = results(fd.DataParallel(wrapped, **arguments), wrapped, autocast)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("count", [1, 2])
def test_replicas_of_torch_compute_the_same_model(count: int) -> None:
    """Two of them share the device. Without dropout, and BatchNorm, whose results depend on the division."""
    module, divided = net(), net()
    for each in (module, divided):
        each[1] = each[3] = torch.nn.Identity()
    placement, pool = ReplicaPlacement(1, (DEVICE,) * count, DEVICE), ThreadPool(count)

    def forward(images: torch.Tensor) -> Any:
        parts = divide((images,), {}, 0, count, 1)
        outputs = compute_on_devices(divided, parts, placement, pool)
        return merge_outputs(outputs, [part.samples for part in parts], 0, "mean")

    for mine, other in zip(results(forward, divided), results(module, module), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
