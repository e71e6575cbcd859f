"""The gallery's accounting finds what it is there to find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gallery import verdict
from tests.gallery.plan import Case, Fault, draw, parse
from tests.gallery.record import record, tracked

SCRIPT = """
import farandole as fd
state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=None, ema=ema, count=0)
"""


class State:
    """What a script would have made."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1)).double()
        torch.nn.init.ones_(self.model[0].weight)
        torch.nn.init.ones_(self.model[0].bias)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.ema = torch.nn.Linear(1, 1).double()
        torch.nn.init.zeros_(self.ema.weight)
        torch.nn.init.zeros_(self.ema.bias)
        self.count, self.step = 3, 3
        self.model(torch.ones(2, 2, dtype=torch.float64)).sum().backward()
        self.optimizer.step()


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def taken(script: str, change: Any = None) -> dict[str, Any]:
    state = State()
    if change is not None:
        with torch.no_grad():
            change(state)
    return record({"state": state}, script)


def test_the_names_that_a_script_tracks_are_read_from_its_text() -> None:
    assert tracked(SCRIPT) == ("state", ["model", "optimizer", "ema", "count"])


def test_equal_workers_are_equal(script: str) -> None:
    records = {"w0": taken(script), "w2": taken(script)}
    assert not [*verdict.unequal(records), *verdict.unlike(records, taken(script))]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.0.weight", lambda state: state.model[0].weight[0, 1].mul_(1 + 1e-15)),
        ("ema.bias", lambda state: state.ema.bias.add_(1e-15)),
        ("model.1.running_mean", lambda state: state.model[1].running_mean.add_(1e-15)),
        (
            "optimizer.state.0.momentum_buffer",
            lambda state: next(iter(state.optimizer.state.values()))["momentum_buffer"].add_(1e-15),
        ),
        ("optimizer.groups.0.lr", lambda state: state.optimizer.param_groups[0].update(lr=0.2)),
        ("count", lambda state: setattr(state, "count", 4)),
        ("steps", lambda state: setattr(state, "step", 4)),
    ],
)
def test_a_worker_that_differs_in_one_value_is_found_and_the_value_is_named(
    script: str, name: str, change: Any
) -> None:
    (found,) = verdict.unequal({"w0": taken(script), "w1": taken(script), "w2": taken(script, change)})
    assert "w0 and w2" in found
    assert f"{name}: " in found


def test_a_difference_to_the_undisturbed_job_is_found_beyond_rounding_only(script: str) -> None:
    for off, count in ((1e-13, 0), (1e-9, 1)):
        records = {"w0": taken(script, lambda state, off=off: state.ema.bias.add_(off))}
        assert len(list(verdict.unlike(records, taken(script)))) == count


def test_what_may_differ_is_left_out(script: str) -> None:
    records = {"w0": taken(script), "w1": taken(script, lambda state: setattr(state, "count", 4))}
    assert not list(verdict.unequal(records, without=("count",)))


def test_the_witness_tells_samples_that_were_trained_twice_or_never() -> None:
    assert not list(verdict.miscounted({"w0": {"model.seen": [0.5, 0.5]}}, 0.5))
    (found,) = verdict.miscounted({"w0": {"model.seen": [0.5, 0.75, 0.25]}}, 0.5)
    assert "(1, 1.5); (2, 0.5)" in found


def test_a_few_samples_may_be_repeated_where_an_epoch_is_filled_up_but_none_may_be_lost() -> None:
    assert not list(verdict.miscounted({"w0": {"model.seen": [0.5, 0.75, 0.5]}}, 0.5, most_repeated=1))
    assert list(verdict.miscounted({"w0": {"model.seen": [0.5, 0.75, 0.75]}}, 0.5, most_repeated=1))
    assert list(verdict.miscounted({"w0": {"model.seen": [0.5, 0.5, 0.25]}}, 0.5, most_repeated=1))


def test_a_plan_is_read_as_it_is_printed() -> None:
    faults = (Fault("w1", "kill", "amp.py:37", 5), Fault("w0", "pause 0.1", "training/data/loader.py:210", 2))
    assert parse("; ".join(map(str, faults))) == faults
    with pytest.raises(ValueError, match="not a fault"):
        parse("w1 kill")


def test_a_drawn_case_leaves_a_worker_and_depends_on_its_seed_alone() -> None:
    hits = {f"w{number}": {"body.py:3": 16, "body.py:4": 2, "optim/a.py:9": 30} for number in range(3)}
    cases = [draw(f"body {seed}", hits) for seed in range(300)]
    assert cases == [draw(f"body {seed}", hits) for seed in range(300)]
    for case in cases:
        assert (
            len({fault.worker for fault in case.faults if not fault.kind.startswith(("pause", "await"))}) < case.workers
        )
        assert all(1 <= fault.hit <= hits["w0"][fault.place] for fault in case.faults)
    assert {case.faults[0].kind.split()[0] for case in cases} >= {
        "kill",
        "leave",
        "scale",
        "join",
        "stop",
        "hang",
        "exit",
    }
    assert isinstance(cases[0], Case)
