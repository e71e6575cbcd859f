"""A WGAN: the critic learns from every global batch, the generator from every third one. Kills workers between the
steps of the two if asked to, and writes down what came of it; without a launcher, what should have come of it."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch

import farandole as fd

SAMPLES, GLOBAL_BATCH, EPOCHS, N_CRITIC = 62, 10, 3, 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--killed", type=Path, help="with it, workers kill themselves; each makes a file there")
    parser.add_argument("--records")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fd.init()

    def die(place: str, at_step: int) -> None:
        mark = options.killed and options.killed / place
        if mark and state.step == at_step and fd.rank() == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    real = torch.randn(SAMPLES, 4, dtype=torch.float64)
    generator, critic = torch.nn.Linear(4, 4).double(), torch.nn.Linear(4, 1).double()
    optimizer_g = fd.DistributedOptimizer(torch.optim.Adam(generator.parameters(), lr=0.01))
    optimizer_c = fd.DistributedOptimizer(torch.optim.RMSprop(critic.parameters(), lr=0.01))
    loader = fd.elastic.DataLoader(torch.utils.data.TensorDataset(real), GLOBAL_BATCH, seed=1)
    state = fd.elastic.TorchState(
        model=generator, optimizer=optimizer_g, loader=loader, critic=critic, optimizer_c=optimizer_c
    )

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> None:
        for epoch in loader.epochs(EPOCHS):
            for (x,) in loader:
                optimizer_c.zero_grad()
                (critic(generator(x.flip(1))) - critic(x)).mean().backward()  # leaves gradients in the generator
                optimizer_c.step()
                die("after the critic's step, alone in its body", at_step=7)
                die("between both steps", at_step=9)
                if state.step % N_CRITIC == 0:
                    optimizer_g.zero_grad()
                    (-critic(generator(x.flip(1)))).mean().backward()
                    optimizer_g.step()
                    die("after both steps", at_step=13)
                if epoch == 1 and loader.cursor == 40:
                    break  # after a body in which the critic has stepped alone

    train(state)
    if fd.rank() == 0:
        tensors = [parameter.detach() for module in (generator, critic) for parameter in module.parameters()]
        made = {
            name: int(next(iter(each.state.values()))["step"])
            for name, each in (("generator", optimizer_g), ("critic", optimizer_c))
        }
        torch.save({"tensors": tensors, "made": made, "steps": state.step}, options.result)


if __name__ == "__main__":
    main()
