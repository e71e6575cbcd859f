"""Loop bodies of several kinds, each with the faults of a seed; `make gallery` has all of them, and more seeds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.gallery.catalogue import BODIES
from tests.gallery.job import Gallery
from tests.gallery.plan import Case, parse
from tests.gallery.run import SHARDS, drawn
from tests.support.pure_order import global_batches


@pytest.fixture(scope="module")
def gallery() -> Gallery:
    return Gallery()


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("plain-tqdm", 4),
        ("amp-plain", 1),
        ("amp-inf", 2),
        ("averages-in-data-before", 3095),
        ("averages-swapped", 3),
        ("schedules-mean", 1),
        ("schedules-callback-two", 2),
        ("parts-values-before", 3),
        ("optimizers-decay-data", 2115),
        ("passes-penalty", 1),
        ("passes-checkpoint", 2),
        ("gan-two", 3),
        ("schedules-callback", 4),
        ("schedules-onecycle", 5),
        ("evaluation-once", 6),
        ("evaluation-save-once", 7),
        ("data-workers", 8),
        ("data-stream", 9),
        ("parts-groups", 10),
        ("optimizers-adamw", 11),
        ("ddp-clip", 12),
        ("hvd-plain", 13),
    ],
)
def test_a_loop_body_comes_out_right_whatever_happens_to_it(gallery: Gallery, name: str, seed: int) -> None:
    case = drawn(gallery, BODIES[name], seed)
    print(case)
    assert gallery.run(BODIES[name], case).violations == []


@pytest.fixture(scope="module")
def strict_gallery() -> Gallery:
    return Gallery(SHARDS)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("schedules-sequential", 1),
        ("averages-teacher", 2),
        ("averages-swapped", 3),
        ("averages-in-data-late", 4),
        ("amp-inf", 5),
        ("accumulation-micro-clip", 6),
        ("data-batchnorm", 7),
        ("optimizers-weight-noise", 8),
        ("parts-extra", 9),
        ("ddp-ema", 10),
    ],
)
def test_in_strict_mode_it_has_the_bits_of_one_worker(strict_gallery: Gallery, name: str, seed: int) -> None:
    case = drawn(strict_gallery, BODIES[name], seed)
    print(case)
    assert strict_gallery.run(BODIES[name], case).violations == []


@pytest.mark.timeout(240)
def test_a_body_trains_what_a_loop_without_the_library_does(gallery: Gallery) -> None:
    """The undisturbed job, which others are compared with: the same by torch alone, in the order as it is defined."""
    import sys

    from tests.gallery.worker import BODIES as FOLDER

    sys.path.insert(0, str(FOLDER))
    try:
        from problem import BATCH, EPOCHS, SAMPLES, Net, Samples
    finally:
        sys.path.remove(str(FOLDER))
    model, data = Net(), Samples()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in global_batches(SAMPLES, BATCH, 5, EPOCHS).values():
        index = torch.tensor([sample for _, sample in batch])
        optimizer.zero_grad()
        F.mse_loss(model(data.x[index], index), data.y[index]).backward()
        optimizer.step()
    peace = gallery.peace(BODIES["plain-readme"])
    assert peace.problems == []
    assert peace.record is not None
    for name, parameter in model.named_parameters():
        found = torch.tensor(peace.record[f"model.{name}"], dtype=torch.float64)
        torch.testing.assert_close(found, parameter.detach().flatten(), rtol=0, atol=1e-12)


@pytest.mark.timeout(240)
def test_a_fault_comes_at_the_line_and_the_time_that_a_plan_says(gallery: Gallery) -> None:
    """A pause changes nothing; a kill of the only worker ends the job."""
    body = BODIES["plain-readme"]
    line = next(
        place for place, hits in gallery.peace(body).hits["w0"].items() if hits == 16 and place.startswith("plain")
    )
    assert gallery.run(body, Case(2, "tcp", 0, parse(f"w1 pause 0.01 at {line}#16"))).happened == 1
    assert gallery.run(body, Case(2, "tcp", 0, parse(f"w1 pause 0.01 at {line}#17"))).happened == 0
    assert gallery.run(body, Case(1, "tcp", 0, parse(f"w0 kill at {line}#3"))).violations
