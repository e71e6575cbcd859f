"""Two networks against each other."""

import sys

import torch
import torch.nn.functional as F
from problem import BATCH, EPOCHS, FEATURES, Net, Samples

import farandole as fd

kind = sys.argv[1]
fd.init()
critic = Net()
generator = torch.nn.Linear(FEATURES, FEATURES).double()
loader = fd.elastic.DataLoader(Samples(), BATCH, seed=5)
second = fd.DistributedOptimizer(torch.optim.SGD(critic.parameters(), lr=0.1))
if kind == "one":
    everything = torch.nn.ModuleList([generator, critic])
    second = fd.DistributedOptimizer(torch.optim.SGD(everything.parameters(), lr=0.1))
    state = fd.elastic.TorchState(model=everything, optimizer=second, loader=loader)
else:
    first = fd.DistributedOptimizer(torch.optim.Adam(generator.parameters(), lr=0.01))
    state = fd.elastic.TorchState(model=generator, optimizer=first, loader=loader, critic=critic, second=second, made=0)


def two(x, index):
    second.zero_grad()
    fake = generator(x.flip(1))
    real_loss = F.softplus(-critic(x, index)).mean()
    (real_loss + F.softplus(critic(fake.detach())).mean()).backward()
    second.step()
    first.zero_grad()
    F.softplus(-critic(fake)).mean().backward()
    first.step()


def wgan(x, index):
    second.zero_grad()
    (critic(generator(x.flip(1))) - critic(x, index)).mean().backward()
    second.step()
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.clamp_(-0.5, 0.5)
    if state.step % 3 == 0:
        first.zero_grad()
        (-critic(generator(x.flip(1)))).mean().backward()
        first.step()


@fd.elastic.run
def train(state):
    for _ in loader.epochs(EPOCHS):
        for x, _, index in loader:
            if kind == "one":
                second.zero_grad()
                fake = generator(x.flip(1))
                F.softplus(-critic(x, index)).mean().add(0.1 * critic(fake).mean()).backward()
                second.step()
            elif kind == "two":
                two(x, index)
                state.made += 1
            else:
                wgan(x, index)


train(state)
