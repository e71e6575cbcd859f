"""The whole state of an optimizer: taken from one, and put into another one that was made by the same code."""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from farandole.errors import ConfigError
from farandole.integrations.horovod.state_handlers import OptimizerStateHandler
from farandole.training.checkpoint.snapshot import from_json, to_json
from farandole.training.optim.optimizer_mixin import Undo
from farandole.training.state.optimizer_state import OptimizerState, outline, with_inner
from farandole.training.state.packing import pack, unpack
from farandole.training.state.sent_optimizer_state import _is_permuted

pytestmark = pytest.mark.core


def parameters() -> list[torch.Tensor]:
    return [torch.arange(3.0, dtype=torch.float64).requires_grad_(), torch.ones(2, 2).double().requires_grad_()]


class Outer(torch.optim.Optimizer):
    """Keeps state in all the places that are known from optimizers in use."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        self.inner = torch.optim.Adam(params, lr=0.1)
        super().__init__(params, {"lr": 0.1, "rho": 0.5})
        self.param_groups = self.inner.param_groups
        self.param_groups[0]["rho"] = 0.5
        self.more = {"second": torch.optim.SGD(params[:1], lr=0.2, momentum=0.9)}
        self.fast_state = self.inner.state
        self.order = list(params)
        self.by_id = {id(each): 0 for each in params}
        self.count = 0
        self.scale = torch.zeros(())
        self.slow = [each.detach().clone() for each in params]
        self.generator = torch.Generator().manual_seed(3)
        self.rules = {each: (lambda gradient, n=n: gradient * (n + 1)) for n, each in enumerate(params)}

    def step(self, closure: Callable[[], float] | None = None) -> None:
        self.inner.step(closure)
        self.more["second"].step()
        self.count += 1
        self.scale += 1
        self.state["rounds"] = {"done": self.count, "last": torch.full((2,), float(self.count))}
        self.param_groups[0]["weight_sum"] = self.param_groups[0].get("weight_sum", 0.0) + 0.25
        self.param_groups[0]["averages"] = [each.detach() * self.count for each in self.order]
        with torch.no_grad():
            for parameter, slow in zip(self.order, self.slow, strict=True):
                noise = torch.randn(parameter.shape, generator=self.generator, dtype=parameter.dtype)
                assert parameter.grad is not None
                slow += 0.5 * (parameter - slow) + noise * self.rules[parameter](parameter.grad)
                entry = self.state[parameter]
                entry.setdefault("factors", [torch.eye(2), []])[0] += self.count
                entry.setdefault("history", deque(maxlen=2)).append(slow.clone())
                self.by_id[id(parameter)] += 1
                self.lazy = (self.count, slow.clone())


def train(optimizer: Outer, steps: int) -> None:
    for number in range(steps):
        for parameter in optimizer.order:
            parameter.grad = torch.full_like(parameter, 0.5 + number)
        optimizer.step()


def everything(optimizer: torch.optim.Optimizer) -> str:
    state = OptimizerState("optimizer", optimizer)
    torch.set_printoptions(precision=17)
    return repr((state.options(), state.entries(), state.parameters))


def take_over(optimizer: torch.optim.Optimizer, packed: Any) -> None:
    state, told = OptimizerState("optimizer", optimizer), unpack(packed)
    with torch.no_grad():
        for parameter, value in zip(state.parameters, told[0], strict=True):
            parameter.copy_(value)
    state.load(told[1])
    state.load_options(told[2])


def told(optimizer: torch.optim.Optimizer) -> Any:
    state = OptimizerState("optimizer", optimizer)
    packed = pack((state.parameters, state.entries(), state.options()))
    return type(packed)(packed.skeleton, [tensor.detach().clone() for tensor in packed.tensors])


def test_a_newcomer_has_all_of_it_and_goes_on_alike() -> None:
    old, new = Outer(parameters()), Outer(parameters())
    train(old, 3)
    take_over(new, told(old))
    assert everything(new) == everything(old)
    train(old, 2)
    train(new, 2)
    assert everything(new) == everything(old)
    assert new.count == 5
    assert new.by_id == dict.fromkeys(map(id, new.order), 5)
    assert new.fast_state is new.inner.state
    assert new.param_groups is new.inner.param_groups
    assert new.state[new.order[0]]["history"].maxlen == 2


def test_one_that_was_further_returns_to_where_the_other_is() -> None:
    old, new = Outer(parameters()), Outer(parameters())
    train(new, 2)
    momentum, slow = new.more["second"].state[new.order[0]]["momentum_buffer"], new.slow
    train(old, 1)
    take_over(new, told(old))
    assert everything(new) == everything(old)
    assert new.more["second"].state[new.order[0]]["momentum_buffer"] is momentum
    assert new.slow is slow
    take_over(new, told(Outer(parameters())))
    assert everything(new) == everything(Outer(parameters()))
    assert not hasattr(new, "lazy")
    assert "weight_sum" not in new.param_groups[0]


def test_a_step_is_taken_back() -> None:
    optimizer = Outer(parameters())
    before = everything(optimizer)
    undo = Undo(optimizer)
    assert not undo.has_moved()
    train(optimizer, 1)
    assert undo.has_moved()
    undo.put_back()
    assert everything(optimizer) == before
    train(optimizer, 2)
    expected = everything(optimizer)
    undo = Undo(optimizer)
    train(optimizer, 1)
    undo.put_back()
    assert everything(optimizer) == expected


def test_a_commit_has_what_state_dict_leaves_out() -> None:
    optimizer = Outer(parameters())
    train(optimizer, 1)
    values = [each.detach().clone() for each in optimizer.order]
    handler, expected = OptimizerStateHandler(optimizer), everything(optimizer)
    train(optimizer, 2)
    with torch.no_grad():
        for parameter, value in zip(optimizer.order, values, strict=True):
            parameter.copy_(value)
    handler.restore()
    assert everything(optimizer) == expected
    assert optimizer.param_groups is optimizer.inner.param_groups


class Bare(torch.optim.Optimizer):
    """Without Optimizer.__init__(), as some that are around another one; state_dict() does not work then."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state, self.count = inner, inner.param_groups, inner.state, 0


def test_a_commit_needs_no_state_dict() -> None:
    optimizer = Bare(torch.optim.SGD(parameters(), lr=0.1, momentum=0.9))
    handler, expected = OptimizerStateHandler(optimizer), everything(optimizer)
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter]["momentum_buffer"] = torch.ones(1)
    optimizer.count = 3
    handler.restore()
    assert everything(optimizer) == expected


def test_a_commit_keeps_a_state_dict_that_the_class_has_written() -> None:
    class Secret(torch.optim.SGD):
        hidden: ClassVar[list[int]] = [1]

        def state_dict(self) -> dict[str, Any]:
            return {"hidden": list(self.hidden)}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.hidden[:] = state_dict["hidden"]

    optimizer = Secret(parameters(), lr=0.1)
    handler = OptimizerStateHandler(optimizer)
    optimizer.hidden.append(2)
    optimizer.param_groups[0]["lr"] = 0.3
    handler.restore()
    assert optimizer.hidden == [1]
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_checkpoint_can_hold_it() -> None:
    old, new = Outer(parameters()), Outer(parameters())
    train(old, 2)
    state = OptimizerState("optimizer", old)
    plain, tensors = to_json((state.parameters, state.entries(), state.options()))
    read = from_json(json.loads(json.dumps(plain)), {name: tensor.detach() for name, tensor in tensors.items()})
    take_over(new, pack(read))
    assert everything(new) == everything(old)


def test_names_are_those_of_the_places() -> None:
    optimizer = Outer(parameters())
    train(optimizer, 1)
    assert set(OptimizerState("x", optimizer).entries()) == {
        *("x.0", "x.1", "x.state", "x.attributes", "x.groups"),
        *("x.inner.0", "x.inner.1", "x.inner.attributes"),
        *("x.more.second.0", "x.more.second.attributes"),
    }
    assert set(OptimizerState("x", optimizer).options()) == {"x", "x.more.second"}


def test_the_state_of_plain_optimizers_has_nothing_else() -> None:
    optimizer = torch.optim.Adam(parameters())
    entries = OptimizerState("optimizer", optimizer).entries()
    assert entries == {"optimizer.attributes": {}}
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert OptimizerState("optimizer", optimizer).entries() == entries


class Preconditioner:
    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter, self.statistics = parameter, [torch.zeros(2), 0]


def test_objects_of_classes_of_the_script_are_taken_apart() -> None:
    old, new = (torch.optim.SGD(parameters(), lr=0.1) for _ in range(2))
    parameter = old.param_groups[0]["params"][1]
    old.state[parameter]["preconditioner"] = made = Preconditioner(parameter)
    made.statistics = [torch.ones(2), 3]
    take_over(new, told(old))
    there = new.param_groups[0]["params"][1]
    found = new.state[there]["preconditioner"]
    assert type(found) is Preconditioner
    assert found.parameter is there
    assert repr(found.statistics) == repr(made.statistics)
    made.statistics[0] += 1
    tensor = found.statistics[0]
    take_over(new, told(old))
    assert new.state[there]["preconditioner"] is found
    assert tensor.tolist() == [2, 2]


def test_a_function_that_only_the_other_has_is_missed() -> None:
    old, new = (torch.optim.SGD(parameters(), lr=0.1) for _ in range(2))
    old.state[old.param_groups[0]["params"][0]]["rule"] = lambda gradient: gradient
    with pytest.raises(ConfigError, match=r"optimizer\.0\.rule is a function.*__init__"):
        take_over(new, told(old))


def test_state_under_a_key_that_nobody_else_has_is_refused() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    optimizer.state[torch.zeros(2)] = {"x": 1}
    with pytest.raises(ConfigError, match="key of type Tensor"):
        OptimizerState("optimizer", optimizer).entries()


def test_a_learning_rate_that_is_a_tensor_stays_the_same_one() -> None:
    optimizer = torch.optim.Adam(parameters(), lr=torch.tensor(0.5))
    rate = optimizer.param_groups[0]["lr"]
    state = OptimizerState("optimizer", optimizer)
    saved = unpack(pack(state.options()))
    saved["optimizer"][0]["lr"] = torch.tensor(0.25)
    state.load_options(saved)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


def test_a_group_that_comes_later_is_part_of_it() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    state = OptimizerState("optimizer", optimizer)
    optimizer.add_param_group({"params": [torch.zeros(1)], "lr": 0.7})
    assert [group["lr"] for group in state.options()["optimizer"]] == [0.1, 0.7]


def test_an_outline_tells_structures_apart_but_not_orders() -> None:
    entry = {"a": [torch.zeros(2), 1], "b": 2}
    assert outline(entry) == outline({"b": 2, "a": [torch.ones(2), 1]})
    for other in ({"a": [torch.zeros(2), 2], "b": 2}, {"a": [torch.zeros(3), 1], "b": 2}, {"a": [], "b": 2}):
        assert outline(entry) != outline(other)


# State that has come from another worker, in the host's memory ------------------------------------------------


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
    OptimizerState("optimizer", optimizer).load({"optimizer.0": entry()})
    assert optimizer.state[parameter]["exp_avg"].device.type == "meta"
    assert optimizer.state[parameter]["step"].device.type == step_is_on


def test_what_is_there_already_is_overwritten() -> None:
    parameter = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.Adam([parameter])
    state = OptimizerState("optimizer", optimizer)
    state.load({"optimizer.0": entry()})
    kept = optimizer.state[parameter]["exp_avg"]
    state.load({"optimizer.0": {"exp_avg": torch.full((2,), 5.0)}})
    assert optimizer.state[parameter]["exp_avg"] is kept
    assert kept.tolist() == [5, 5]
    assert "step" not in optimizer.state[parameter]


def test_torchs_own_attributes_are_known() -> None:
    """Also of the release of torch that is installed: all that an Optimizer without a class of its own has."""
    optimizer = torch.optim.Optimizer(parameters(), {})
    assert OptimizerState("optimizer", optimizer).entries() == {"optimizer.attributes": {}}


def test_a_tensor_lies_in_memory_as_it_did() -> None:
    """Products of matrices round by it: those of a newcomer would differ from the others' in the last bit."""
    old, new = (torch.optim.SGD(parameters(), lr=0.1) for _ in range(2))
    old.state[old.param_groups[0]["params"][1]]["Q"] = basis = torch.linalg.qr(torch.randn(3, 3)).Q
    for _ in range(2):
        take_over(new, told(old))
        found = new.state[new.param_groups[0]["params"][1]]["Q"]
        assert torch.equal(found, basis)
        assert found.stride() == basis.stride() == (1, 3)
        basis += 1


def test_optimizers_that_hold_each_other_are_found_once() -> None:
    outer, inner = (torch.optim.SGD([torch.zeros(1)], lr=0.1) for _ in range(2))
    outer.__dict__["inner"], inner.__dict__["outers"] = inner, [outer]
    assert list(with_inner("optimizer", outer).items()) == [("optimizer", outer), ("optimizer.inner", inner)]


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(2, 3), False),  # contiguous
        (torch.zeros(2, 3).t(), True),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(4, 6)[:, ::2], False),  # with holes
        (torch.zeros(3, 1).expand(3, 4), False),  # several places in one
    ],
)
def test_tensors_in_another_order_of_dimensions_are_told_from_those_with_holes(
    tensor: torch.Tensor, expected: bool
) -> None:
    assert _is_permuted(tensor) is expected


def test_the_state_of_parameters_of_which_each_worker_has_a_part_stays_when_that_of_another_worker_is_loaded() -> None:
    class DTensor(torch.nn.Parameter):
        pass

    part, whole = DTensor(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([part, whole])
    part.grad, whole.grad = torch.ones(2), torch.ones(2)
    optimizer.step()
    state = OptimizerState("optimizer", optimizer)
    received = copy.deepcopy(state.entries())
    optimizer.step()
    mean = optimizer.state[part]["exp_avg"].clone()
    state.load(received)
    assert optimizer.state[part]["step"] == 2
    assert torch.equal(optimizer.state[part]["exp_avg"], mean)
    assert optimizer.state[whole]["step"] == 1
