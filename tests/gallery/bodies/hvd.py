"""Scripts as they are written for Horovod: commits, an ElasticSampler, and everything by name."""

import sys

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from problem import EPOCHS, Net, Samples

kind = sys.argv[1]
hvd.init()
model = Net()
model.share = 2  # also for the last batch of an epoch, which may have one sample
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), op=hvd.Sum
)
dataset = Samples()
sampler = hvd.elastic.ElasticSampler(dataset, shuffle=False)
loader = torch.utils.data.DataLoader(dataset, batch_size=2, sampler=sampler)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
state = hvd.elastic.TorchState(
    model=model, optimizer=optimizer, sampler=sampler, scheduler=scheduler, epoch=0, batch=0, losses=[]
)


@hvd.elastic.run
def train(state):
    while state.epoch < EPOCHS:
        for number, (x, y, index) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x, index), y)
            loss.backward()
            if kind == "clip":
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            if kind == "schedule":
                scheduler.step()
            elif kind == "metrics":
                state.losses = [*state.losses, hvd.allreduce(loss.detach(), name="loss").item()]
            sampler.record_batch(number, 2)
            state.batch += 1
            if kind == "each" or state.batch % 3 == 0:
                state.commit()
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        state.commit()


train(state)
