"""Parameters and tracked values of all kinds."""

import collections
import sys

import numpy
import torch
import torch.nn.functional as F
from problem import BATCH, EPOCHS, Net, Samples
from torch.nn.utils import parametrizations

import farandole as fd

kind = sys.argv[1]
fd.init()


class Extra(Net):
    """Has a state that is neither parameter nor buffer, and a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("sum", torch.zeros(8, dtype=torch.float64), persistent=False)

    def forward(self, x, index=None):
        self.calls += 1
        self.sum += 1.0
        return super().forward(x, index)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


class Tied(Net):
    def __init__(self):
        super().__init__(hidden=6)
        self.between[0] = torch.nn.Linear(6, 6).double()
        self.between[0].weight = self.first.weight


class Log:
    """Stateful, by torch's protocol."""

    def __init__(self):
        self.lines = []

    def state_dict(self):
        return {"lines": list(self.lines)}

    def load_state_dict(self, state):
        self.lines = list(state["lines"])


model = Extra() if kind == "extra" else Tied() if kind == "tied" else Net()
if kind == "weight-norm":
    parametrizations.weight_norm(model.first)
elif kind == "old-weight-norm":
    model.first = torch.nn.utils.weight_norm(model.first)
elif kind == "spectral-norm":
    parametrizations.spectral_norm(model.first)
elif kind == "orthogonal":
    parametrizations.orthogonal(model.first)
elif kind == "frozen":
    model.first.requires_grad_(False)
groups = [{"params": list(model.parameters())}]
if kind in ("groups", "unfreeze"):
    groups = [{"params": list(part.parameters()), "lr": lr} for part, lr in ((model.first, 0.05), (model.last, 0.2))]
    groups.append({"params": [model.seen]})
    if kind == "unfreeze":
        groups[0]["lr"] = 0.0
optimizer = fd.DistributedOptimizer(
    torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    if kind == "frozen"
    else torch.optim.SGD(groups, lr=0.1)
)
loader = fd.elastic.DataLoader(Samples(), BATCH, seed=5)
state = fd.elastic.TorchState(
    model=model,
    optimizer=optimizer,
    loader=loader,
    count=0,
    names=[],
    table={"loss": []},
    window=collections.deque(maxlen=3),
    total=torch.zeros(2, dtype=torch.float64),
    log=Log(),
    pair=(0, 1),
    array=numpy.zeros(3),
    sets={1},
    tensors={"sum": torch.zeros(3, dtype=torch.float64)},
)


@fd.elastic.run
def train(state):
    for _ in loader.epochs(EPOCHS):
        for x, y, index in loader:
            if kind == "values-before":
                state.count += 1
                state.names.append(f"step {state.step}")
                state.table["loss"].append(state.step)
                state.window.append(state.step)
                state.log.lines.append(state.step)
                state.array += 1.0
                state.sets.add(state.step)
                state.pair = (state.pair[1], state.pair[0] + state.pair[1])
            elif kind == "tensor-before":
                state.total += 1.0
                state.tensors["sum"].add_(torch.arange(3.0))
            elif kind == "unfreeze" and state.step == 6:
                optimizer.param_groups[0]["lr"] = 0.05
            optimizer.zero_grad()
            F.mse_loss(model(x, index), y).backward()
            if kind == "values-between":
                state.count += 1
                state.names.append(f"step {state.step}")
            applied = optimizer.step()
            if kind == "values-after" and applied:
                state.count += 1
                state.names.append(f"step {state.step}")
                state.window.append(state.step)
                state.log.lines.append(state.step)
            elif kind == "tensor-after" and applied:
                state.total += 1.0
                state.total[0].mul_(1.01)
            elif kind == "unconditional":
                state.count += 1
                state.total += 1.0


train(state)
