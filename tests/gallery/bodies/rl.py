"""Reinforcement learning: what is learned from is collected with the policy as it is, and used several times."""

import sys

import torch
from problem import BATCH, FEATURES, Net, Samples

import farandole as fd

kind = sys.argv[1]
ITERATIONS, PASSES = 2, 2
fd.init()
policy = Net()
optimizer = fd.DistributedOptimizer(torch.optim.Adam(policy.parameters(), lr=0.01))


class Buffer(Samples):
    """All workers collect the same, from a seed; filled anew in each iteration."""

    def collect(self, iteration):
        source = torch.Generator().manual_seed(iteration)
        self.x.copy_(torch.randn(len(self.x), FEATURES, dtype=torch.float64, generator=source))
        with torch.no_grad():
            value = policy(self.x)
        self.y.copy_(torch.sin(self.x.sum(1, keepdim=True)) - 0.5 * value)

    def state_dict(self):
        return {"x": self.x.clone(), "y": self.y.clone()}

    def load_state_dict(self, state):
        self.x.copy_(state["x"])
        self.y.copy_(state["y"])


rollouts = Buffer()
loader = fd.elastic.DataLoader(rollouts, BATCH, seed=5)
state = fd.elastic.TorchState(
    model=policy, optimizer=optimizer, loader=loader, dataset=rollouts, collected=-1, returns=[]
)


def collect(iteration):
    rollouts.collect(iteration)
    state.collected = iteration
    if kind == "returns":
        state.returns = [*state.returns, rollouts.y.mean().item()]


@fd.elastic.run
def train(state):
    for epoch in loader.epochs(ITERATIONS * PASSES):
        if state.collected < epoch // PASSES:
            collect(epoch // PASSES)
        for x, advantage, index in loader:
            optimizer.zero_grad()
            chance = torch.sigmoid(policy(x, index))
            ratio = chance / chance.detach()
            (-torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()


train(state)
