"""Optimizers of all kinds, written from the formulas of their papers: each keeps its state somewhere else.

optimizer_kinds_job.py trains with them; tests/integration/test_optimizer_kinds.py compares.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

Closure = Callable[[], torch.Tensor]

SAMPLES, BATCH, EPOCHS, SEED, FEATURES, CLASSES = 96, 12, 3, 3, 6, 4
STEPS = EPOCHS * SAMPLES // BATCH


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 5), torch.nn.Tanh(), torch.nn.Linear(5, CLASSES, bias=False)
    ).double()


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    centers = torch.randn(CLASSES, FEATURES, dtype=torch.float64, generator=generator)
    noise = torch.randn(SAMPLES, FEATURES, dtype=torch.float64, generator=generator)
    return TensorDataset(centers[labels] + noise, labels)


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


class Optimizer(torch.optim.Optimizer):
    """Base of those below: step() without a closure, parameters one by one."""

    def __init__(self, params: Iterable[torch.Tensor], **defaults: Any) -> None:
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


# Around another optimizer ------------------------------------------------------------------------------------------


class LookaheadList(torch.optim.Optimizer):
    """Zhang et al., 2019. Slow weights in a list; groups are those of the optimizer inside, counters are in them."""

    def __init__(self, optimizer: torch.optim.Optimizer, k: int = 3, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups
        for group in self.param_groups:
            group["counter"] = 0
        self.slow_weights = [[p.clone().detach() for p in group["params"]] for group in self.param_groups]

    def zero_grad(self) -> None:  # type: ignore[override]
        self.optimizer.zero_grad()

    def step(self, closure: Closure | None = None) -> Any:
        loss = self.optimizer.step(closure)
        for group, slow_weights in zip(self.param_groups, self.slow_weights, strict=True):
            group["counter"] += 1
            if group["counter"] % self.k == 0:
                for slow, p in zip(slow_weights, group["params"], strict=True):
                    slow.add_(p.data - slow, alpha=self.alpha)
                    p.data.copy_(slow)
        return loss


class LookaheadState(torch.optim.Optimizer):
    """The other usual form: no state of its own class, slow weights made when they are needed, a step counter."""

    def __init__(self, base: torch.optim.Optimizer, k: int = 3, alpha: float = 0.5) -> None:
        self.base_optimizer = base
        self.param_groups = base.param_groups
        self.defaults = base.defaults
        self.state = defaultdict(dict)
        self.fast_state = base.state
        self._total_steps = 0
        self.k, self.alpha = k, alpha

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base_optimizer.zero_grad(set_to_none)

    def step(self, closure: Closure | None = None) -> Any:
        loss = self.base_optimizer.step(closure)
        self._total_steps += 1
        if self._total_steps % self.k == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if "slow" not in state:
                        state["slow"] = torch.zeros_like(p.data).copy_(p.data)
                    state["slow"] += (p.data - state["slow"]) * self.alpha
                    p.data.copy_(state["slow"])
        return loss


class Several(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, as in recipes for Muon: a list of optimizers."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        super().__init__(params, {})
        self.parts = [
            torch.optim.SGD([p for p in params if p.dim() > 1], lr=0.05, momentum=0.9, nesterov=True),
            torch.optim.AdamW([p for p in params if p.dim() == 1], lr=0.02),
        ]

    def step(self, closure: Closure | None = None) -> Any:
        for part in self.parts:
            part.step()


class Sam(torch.optim.Optimizer):
    """Foret et al., 2021: two backward passes for each step, the second one where the loss is worst nearby."""

    def __init__(self, params: Iterable[torch.Tensor], base: type[torch.optim.Optimizer], rho: float, **options: Any):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        assert closure is not None
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        loss = closure()
        self.second_step()
        return loss


# State in `state`, of every shape ------------------------------------------------------------------------------------


class Lars(Optimizer):
    """You et al., 2017."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        grad = grad + 1e-3 * p
        norm, grad_norm = p.norm(), grad.norm()
        trust = torch.where((norm > 0) & (grad_norm > 0), 0.1 * norm / grad_norm, 1.0)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        state["momentum_buffer"].mul_(0.9).add_(grad * trust)
        p.sub_(group["lr"] * state["momentum_buffer"])


class Lamb(Optimizer):
    """You et al., 2020. `state["step"]` is a number of Python's."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        mean, square = state["exp_avg"].lerp_(grad, 0.1), state["exp_avg_sq"].lerp_(grad * grad, 0.01)
        ratio = mean / (1 - 0.9 ** state["step"]) / ((square / (1 - 0.99 ** state["step"])).sqrt() + 1e-6) + 0.01 * p
        norm, ratio_norm = p.norm(), ratio.norm()
        trust = torch.where((norm > 0) & (ratio_norm > 0), norm / ratio_norm, 1.0)
        p.sub_(group["lr"] * trust * ratio)


class Shampoo(Optimizer):
    """Gupta et al., 2018: a list of preconditioners for each parameter, and of their roots, made every second step."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            eyes = [torch.eye(size, dtype=p.dtype) for size in p.shape]
            state.update(step=0, preconditioners=[1e-2 * eye for eye in eyes], roots=eyes)
        for axis, factor in enumerate(state["preconditioners"]):
            rows = grad.movedim(axis, 0).reshape(p.shape[axis], -1)
            factor.add_(rows @ rows.T)
        if state["step"] % 2 == 0:
            for place, factor in enumerate(state["preconditioners"]):
                values, vectors = torch.linalg.eigh(factor)
                state["roots"][place] = vectors @ torch.diag(values.clamp_min(1e-6) ** (-0.5 / p.dim())) @ vectors.T
        state["step"] += 1
        for axis, root in enumerate(state["roots"]):
            grad = torch.tensordot(root, grad, dims=([1], [axis])).movedim(0, axis)
        p.sub_(group["lr"] * grad)


class Soap(Optimizer):
    """Vyas et al., 2024: Adam in the eigenbasis of Shampoo's preconditioners. An empty list for what has no basis."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "GG" not in state:
            eyes = [torch.eye(size, dtype=p.dtype) if p.dim() > 1 else [] for size in p.shape]
            state.update(step=0, GG=eyes, Q=[each.clone() if torch.is_tensor(each) else [] for each in eyes])
            state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        for axis, factor in enumerate(state["GG"]):
            if torch.is_tensor(factor):
                rows = grad.movedim(axis, 0).reshape(p.shape[axis], -1)
                factor.lerp_(rows @ rows.T, 0.05)
                state["Q"][axis] = torch.linalg.qr(factor @ state["Q"][axis]).Q
        state["exp_avg"].lerp_(grad, 0.1)
        state["exp_avg_sq"].mul_(0.95).add_(self._turn(grad, state["Q"], False) ** 2, alpha=0.05)
        step = self._turn(state["exp_avg"], state["Q"], False) / (state["exp_avg_sq"].sqrt() + 1e-4)
        p.sub_(group["lr"] * self._turn(step, state["Q"], True))

    def _turn(self, tensor: torch.Tensor, bases: list[Any], is_back: bool) -> torch.Tensor:
        for axis, basis in enumerate(bases):
            if torch.is_tensor(basis):
                tensor = torch.tensordot(basis if is_back else basis.T, tensor, dims=([1], [axis])).movedim(0, axis)
        return tensor


class MuonLike(Optimizer):
    """Jordan et al., 2024: momentum of matrices, made orthogonal by Newton-Schulz iterations."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
        buffer.lerp_(grad, 0.1)
        update = grad.lerp(buffer, 0.9)
        if p.dim() == 2:
            update = update / (update.norm() + 1e-7)
            for _ in range(5):
                square = update @ update.T
                update = 3.4445 * update + (-4.7750 * square + 2.0315 * square @ square) @ update
        p.sub_(group["lr"] * update)


class ScheduleFree(Optimizer):
    """Defazio et al., 2024, for SGD: z is in state, the mean's weights are in the groups, and the parameters are
    another point (y) for training than for evaluation (x)."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float, beta: float = 0.9) -> None:
        super().__init__(params, lr=lr, beta=beta, k=0, weight_sum=0.0, train_mode=True)

    @torch.no_grad()
    def train(self) -> None:
        self._switch(True, lambda beta: 1 - beta)

    @torch.no_grad()
    def eval(self) -> None:
        self._switch(False, lambda beta: 1 - 1 / beta)

    def _switch(self, to_train: bool, weight: Callable[[float], float]) -> None:
        for group in self.param_groups:
            if group["train_mode"] != to_train:
                group["train_mode"] = to_train
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight(group["beta"]))

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        assert all(group["train_mode"] for group in self.param_groups), "call train() first"
        for group in self.param_groups:
            group["k"] += 1
            group["lr_max"] = max(group["lr"], group.get("lr_max", 0.0))
            weight = group["k"] ** 0.5 * group["lr_max"] ** 2
            group["weight_sum"] += weight
            mixed, beta, lr = weight / group["weight_sum"], group["beta"], group["lr"]
            for p in group["params"]:
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.clone()
                p.lerp_(state["z"], mixed).add_(p.grad, alpha=lr * (beta * (1 - mixed) - 1))
                state["z"].sub_(p.grad, alpha=lr)


# Elsewhere ---------------------------------------------------------------------------------------------------------


class Centralized(torch.optim.SGD):
    """Gradient centralization (Yong et al., 2020): a subclass that changes gradients first."""

    def step(self, closure: Closure | None = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None and p.dim() > 1:
                        p.grad.sub_(p.grad.mean(dim=tuple(range(1, p.dim())), keepdim=True))
        return super().step(closure)


class Attributes(torch.optim.Optimizer):
    """A counter, tensors, a generator of noise and things by id in its attributes; keys of its own in `state`."""

    def __init__(self, params: list[torch.Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self._step_count = 0
        self.scale = torch.ones((), dtype=torch.float64)
        self.momentum = {id(p): torch.zeros_like(p) for p in params}
        self.noise = torch.Generator().manual_seed(7)
        self.trace: tuple[float, ...] = ()

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        self._step_count += 1
        self.scale.mul_(0.99)
        for group in self.param_groups:
            for p in group["params"]:
                noise = torch.randn(p.shape, generator=self.noise, dtype=p.dtype)
                self.momentum[id(p)].mul_(0.9).add_(p.grad + 0.01 * noise)
                p.sub_(group["lr"] * self.scale * self.momentum[id(p)] / self._step_count**0.1)
        self.trace = (*self.trace[-2:], float(self.scale))
        self.state["global"] = {"steps": self._step_count, "last": self.scale.clone()}
        self.state["best"] = torch.maximum(self.state.get("best", self.scale), self.scale)


class Rules(torch.optim.Optimizer):
    """A function for each parameter, which keeps its state in the optimizer that it was made by."""

    def __init__(self, params: list[torch.Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.calls = 0
        self.rules = {p: self._rule(0.5 + 0.1 * place) for place, p in enumerate(params)}

    def _rule(self, decay: float) -> Callable[[torch.Tensor], torch.Tensor]:
        def rule(p: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
            assert p.grad is not None
            return velocity.mul_(decay).add_(p.grad) / (1 + 0.01 * self.calls)

        return rule

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * self.rules[p](p))


class InGroups(Optimizer):
    """Averages of the parameters in the groups, as some implementations of averaging have them."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        averages = group.setdefault("averages", [each.detach().clone() for each in group["params"]])
        average = next(a for a, each in zip(averages, group["params"], strict=True) if each is p)
        group["seen"] = group.get("seen", 0) + 1
        p.sub_(group["lr"] * grad + 0.01 * (p - average))
        average.lerp_(p, 0.2)


Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

TORCH: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "SGD nesterov foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "Adam amsgrad foreach": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.02, fused=True),
    "Adam lr tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.02, dtype=torch.float64)),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "AdamW fused amsgrad": lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.05, fused=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.02),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.02),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.02),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.005),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, t0=5),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
}
if hasattr(torch.optim, "Muon"):  # torch 2.6 does not have it
    TORCH["Muon"] = lambda p: torch.optim.Muon([each for each in p if each.dim() == 2], lr=0.02)

WRITTEN: dict[str, Make] = {
    "Lookahead, list": lambda p: LookaheadList(torch.optim.Adam(p, lr=0.02)),
    "Lookahead, state": lambda p: LookaheadState(torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "several inside": lambda p: Several(list(p)),
    "LARS": lambda p: Lars(p, lr=0.1),
    "LAMB": lambda p: Lamb(p, lr=0.02),
    "Shampoo": lambda p: Shampoo(p, lr=0.05),
    "SOAP": lambda p: Soap(p, lr=0.01),
    "Muon-like": lambda p: MuonLike(p, lr=0.02),
    "schedule-free": lambda p: ScheduleFree(p, lr=0.2),
    "gradient centralization": lambda p: Centralized(p, lr=0.05, momentum=0.9),
    "attributes": lambda p: Attributes(list(p), lr=0.05),
    "a function for each parameter": lambda p: Rules(list(p), lr=0.05),
    "averages in groups": lambda p: InGroups(p, lr=0.1),
}


def sam(parameters: list[torch.nn.Parameter]) -> Sam:
    return Sam(parameters, torch.optim.SGD, rho=0.05, lr=0.05, momentum=0.9)


# What is compared ----------------------------------------------------------------------------------------------------

_OF_TORCH = frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.1))) - {"state", "param_groups"} | {
    "_step_supports_amp_scaling"
}


def whole(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Every tensor, number and string that can be reached from the optimizer, by where it is, and the parameters."""
    names: dict[int, str] = {id(p): f"<{name}>" for name, p in model.named_parameters()}
    found: dict[str, Any] = {names[id(p)]: p.detach().clone() for p in model.parameters()}
    seen = set[int]()

    def look(path: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if id(value) not in names:
                found[path] = value.detach().clone()
        elif isinstance(value, (bool, int, float, str)):
            found[path] = names.get(value, value) if isinstance(value, int) else value
        elif isinstance(value, torch.Generator):
            found[path] = value.get_state()
        elif isinstance(value, (list, tuple)):
            for place, each in enumerate(value):
                look(f"{path}[{place}]", each)
        elif isinstance(value, dict):
            for key, each in value.items():
                name = names.get(id(key)) or (names.get(key) if isinstance(key, int) else None) or repr(key)
                look(f"{path}[{name}]", each)
        elif isinstance(value, torch.optim.Optimizer) and id(value) not in seen:
            seen.add(id(value))
            for key, each in vars(value).items():
                if key not in _OF_TORCH and key not in getattr(value, "farandole_attributes", ()):
                    look(f"{path}.{key}", each)

    look("", optimizer)
    return found


def difference(ours: dict[str, Any], theirs: dict[str, Any], atol: float) -> str:
    """The first place in which two of them differ; "" if none."""
    if ours.keys() != theirs.keys():
        return f"only one has {sorted(ours.keys() ^ theirs.keys())[:4]}"
    for place, one in ours.items():
        other = theirs[place]
        if isinstance(one, torch.Tensor):
            if one.dtype != other.dtype or one.shape != other.shape:
                return f"{place}: {one.dtype}{tuple(one.shape)} and {other.dtype}{tuple(other.shape)}"
            far = (one.double() - other.double()).abs().max().item() if one.numel() else 0.0
            if not far <= atol:
                return f"{place}: {far:.3g} apart"
        elif isinstance(one, float):
            if not abs(one - other) <= atol:
                return f"{place}: {one} and {other}"
        elif one != other:
            return f"{place}: {one!r} and {other!r}"
    return ""
