"""Scripts of different styles. The first word of a name says what is unusual: steps, schedule, state, data, model."""

from __future__ import annotations

from tests.differential.frame import Piece

_OPTIMIZERS = {
    "sgd": "torch.optim.SGD(model.parameters(), lr=LR)",
    "nesterov": "torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, nesterov=True, weight_decay=1e-3)",
    "adam": "torch.optim.Adam(model.parameters(), lr=1e-2)",
    "adamw-fused": "torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)",
    "adamw-foreach": "torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)",
    "amsgrad": "torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True)",
    "rmsprop": "torch.optim.RMSprop(model.parameters(), lr=1e-2)",
    "adagrad": "torch.optim.Adagrad(model.parameters(), lr=1e-2)",
    "nadam": "torch.optim.NAdam(model.parameters(), lr=1e-2)",
    "no-closure": "NoClosure(model.parameters(), lr=LR)",
}
_NO_CLOSURE = """
class NoClosure(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])
"""
_SCHEDULERS = {
    "step": ("torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)", "epoch"),
    "cosine": ("torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))", "batch"),
    "one-cycle": ("torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=EPOCHS * len(loader))", "batch"),
    "sequential": (
        "torch.optim.lr_scheduler.SequentialLR(optimizer, [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 4), "
        "torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)], [4])",
        "batch",
    ),
    "lambda": ("torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n)", "batch"),
}
_STEP = "loss = F.cross_entropy(model(x), y)\noptimizer.zero_grad()\nloss.backward()\n"
_STEP_OF = "loss = {loss}\noptimizer.zero_grad()\nloss.backward()\noptimizer.step()\n"
_CONV = """
net = nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2, padding=1), nn.ReLU(), nn.Flatten())
net.append(nn.LazyLinear(2))
net(torch.zeros(1, 8))
"""


def _of_optimizers() -> dict[str, Piece]:
    return {
        f"steps-{name}": Piece(top=_NO_CLOSURE if name == "no-closure" else "", before=f"optimizer = {made}")
        for name, made in _OPTIMIZERS.items()
    }


def _of_schedulers() -> dict[str, Piece]:
    made = {}
    for name, (scheduler, when) in _SCHEDULERS.items():
        before = Piece.before + f"\nscheduler = {scheduler}"
        body = Piece.body + ("scheduler.step()" if when == "batch" else "")
        after = "scheduler.step()" if when == "epoch" else ""
        end = "report(model=model, lr=optimizer.param_groups[0]['lr'])"
        made[f"schedules-{name}"] = Piece(before=before, body=body, after=after, end=end)
    return made


_STEPS = {
    "steps-clip": Piece(
        body=_STEP + "nn.utils.clip_grad_norm_(model.parameters(), 0.5)\noptimizer.step()\n",
    ),
    "steps-cancelled-gradients": Piece(
        body=_STEP
        + "for name, p in model.named_parameters():\n    if epoch < 2 and '2.' in name:\n        p.grad = None\n"
        + "optimizer.step()\n",
    ),
    "steps-clip-value": Piece(
        body=_STEP + "nn.utils.clip_grad_value_(model.parameters(), 0.05)\noptimizer.step()\n",
    ),
    "steps-leave-out-small-batches": Piece(
        data="""
            dataset = Rows(54)
            sampler = DistributedSampler(dataset, seed=1)
            loader = DataLoader(dataset, BATCH, sampler=sampler)
            """,
        body="if len(x) < BATCH:\n    continue\n" + Piece.body.lstrip("\n"),
    ),
    "steps-with-the-length-of-the-validation": Piece(
        after="""
            model.eval()
            held = DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset, shuffle=False))
            count, total = len(held), torch.zeros(())
            with torch.no_grad():
                for x, y in held:
                    total += F.cross_entropy(model(x), y)
            total /= count
            dist.all_reduce(total)
            total /= dist.get_world_size()
            model.train()
            """,
        end="report(model=model, validated=total)",
    ),
    "steps-accumulate": Piece(
        body="""
            with model.no_sync() if it % 2 == 0 else torch.enable_grad():
                (F.cross_entropy(model(x), y) / 2).backward()
            if it % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
            """,
    ),
    "steps-accumulate-tail": Piece(
        body="""
            last = it + 1 == len(loader)
            (F.cross_entropy(model(x), y) / 2).backward()
            if it % 2 == 1 or last:
                optimizer.step()
                optimizer.zero_grad()
            """,
    ),
    "steps-accumulate-and-skip": Piece(
        before=Piece.before + "\nupdates = 0",
        body="""
            if epoch == 0 and it == 3 and dist.get_rank() == 0:
                x = x * float("nan")
            with model.no_sync() if it % 2 == 0 else torch.enable_grad():
                (F.cross_entropy(model(x), y) / 2).backward()
            if it % 2 == 1:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if torch.isfinite(norm):
                    optimizer.step()
                    updates += 1
                optimizer.zero_grad()
            """,
        end="report(model=model, updates=updates)",
    ),
    "steps-accumulate-zero-first-and-skip": Piece(
        before=Piece.before + "\nupdates = 0",
        body="""
            if epoch == 1 and it == 2 and dist.get_rank() == 1:
                x = x * float("inf")
            if it % 2 == 0:
                optimizer.zero_grad()
            (F.cross_entropy(model(x), y) / 2).backward()
            if it % 2 == 1 and torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
                optimizer.step()
                updates += 1
            """,
        end="report(model=model, updates=updates)",
    ),
    "steps-accumulate-counted": Piece(
        before=Piece.before
        + """
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
average, updates, bodies, rates = copy.deepcopy(net), 0, 0, []
""",
        body="""
            bodies += 1
            with model.no_sync() if it % 2 == 0 else torch.enable_grad():
                (F.cross_entropy(model(x), y) / 2).backward()
            if it % 2 == 1:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                updates += 1
                rates.append(LR / (1 + epoch * len(loader) + it))
                with torch.no_grad():
                    for old, new in zip(average.parameters(), net.parameters()):
                        old.lerp_(new, 0.3)
            """,
        end="report(model=model, average=average, updates=updates, bodies=bodies, rates=rates, "
        "lr=optimizer.param_groups[0]['lr'])",
    ),
    "steps-accumulate-rate-of-batch": Piece(
        body="""
            step, last = it // 2, len(loader) // 2
            if step >= last:
                continue
            for group in optimizer.param_groups:
                group["lr"] = LR / (1 + epoch * last + step)
            (F.cross_entropy(model(x), y) / 2).backward()
            if (it + 1) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            """,
    ),
    "steps-accumulate-three": Piece(
        before=Piece.before + "\nupdates = 0",
        body="""
            if it % 3 == 0:
                optimizer.zero_grad()
            (F.cross_entropy(model(x), y) / 3).backward()
            if it % 3 == 2 or it + 1 == len(loader):
                optimizer.step()
                updates += 1
            """,
        end="report(model=model, updates=updates)",
    ),
    "steps-accumulate-unequal": Piece(
        data="""
            dataset = Rows(44)
            sampler = DistributedSampler(dataset, seed=1)
            loader = DataLoader(dataset, BATCH, sampler=sampler)
            """,
        body="""
            (F.cross_entropy(model(x), y) / 2).backward()
            if it % 2 == 1 or it + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
            """,
    ),
    "steps-accumulate-sum": Piece(
        body="""
            (F.cross_entropy(model(x), y, reduction="sum") / 8).backward()
            if it % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
            """,
    ),
    "steps-accumulate-ignored": Piece(
        body="""
            (F.cross_entropy(model(x), torch.where(x[:, 0] > 0.3, -100, y)) / 2).backward()
            if it % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
            """,
    ),
    "steps-zero-first": Piece(
        body="optimizer.zero_grad(set_to_none=False)\nF.cross_entropy(model(x), y).backward()\noptimizer.step()\n",
    ),
    "steps-two-losses": Piece(
        body="""
            optimizer.zero_grad()
            output = model(x)
            (F.cross_entropy(output, y) + 0.1 * output.square().mean()).backward()
            optimizer.step()
            """,
    ),
    "steps-skip-by-agreement": Piece(
        body="""
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            bad = torch.tensor(float(epoch == 1 and it == 1))
            dist.all_reduce(bad)
            if bad > 0:
                continue
            loss.backward()
            optimizer.step()
            """,
    ),
    "steps-skip-by-norm": Piece(
        body=_STEP
        + """
if nn.utils.clip_grad_norm_(model.parameters(), 10.0) < 1e9 and not (epoch == 1 and it == 1):
    optimizer.step()
""",
    ),
    "steps-break": Piece(body="if it == 3:\n    break\n" + Piece.body),
    "steps-max-steps": Piece(
        before=Piece.before + "\nsteps = 0",
        body="if steps == 11:\n    break\n" + Piece.body + "steps += 1",
    ),
    "steps-scaler": Piece(
        before=Piece.before + "\nscaler = torch.amp.GradScaler('cpu', init_scale=8.0)",
        body="""
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            """,
    ),
    "steps-autocast": Piece(
        body="""
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            """,
    ),
    "steps-two-optimizers": Piece(
        before="""
            optimizer = torch.optim.SGD(net[0].parameters(), lr=LR)
            head = torch.optim.Adam(net[2].parameters(), lr=1e-2)
            """,
        body=_STEP + "head.step()\noptimizer.step()\nhead.zero_grad()\n",
    ),
    "steps-groups": Piece(
        before="""
            decay = [p for p in model.parameters() if p.ndim > 1]
            rest = [p for p in model.parameters() if p.ndim <= 1]
            groups = [dict(params=decay, weight_decay=0.1), dict(params=rest, weight_decay=0.0, lr=0.01)]
            optimizer = torch.optim.AdamW(groups, lr=1e-2)
            """,
    ),
    "steps-evaluate-between": Piece(
        body=Piece.body + "with torch.no_grad():\n    model.eval(), model(x), model.train()\n",
    ),
    "steps-warm-up-backward": Piece(
        before=Piece.before
        + """
F.cross_entropy(model(torch.zeros(4, 8)), torch.zeros(4, dtype=torch.long)).backward()
optimizer.zero_grad()
""",
    ),
    "steps-unused": Piece(
        model="""
            net = nn.ModuleDict(dict(a=nn.Linear(8, 2), b=nn.Linear(8, 2)))
            class Two(nn.Module):
                def __init__(self, parts):
                    super().__init__()
                    self.parts = parts

                def forward(self, x, odd):
                    return self.parts["b" if odd else "a"](x)

            model = DDP(Two(net), find_unused_parameters=True)
            """,
        body="""
            loss = F.cross_entropy(model(x, it % 2 == 1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            """,
    ),
}

_STATES = {
    "states-ema": Piece(
        before=Piece.before + "\nema = copy.deepcopy(net)",
        body=Piece.body
        + """
with torch.no_grad():
    for old, new in zip(ema.parameters(), net.parameters()):
        old.mul_(0.9).add_(new, alpha=0.1)
""",
        end="report(model=model, ema=ema)",
    ),
    "states-own-queue": Piece(
        before=Piece.before + "\nqueue = torch.zeros(8, 2)",
        body="""
            output = model(x)
            loss = F.cross_entropy(output, y) + 0.1 * (output.mean(0) - queue.mean(0)).square().sum()
            queue[len(x) :] = queue[: -len(x)].clone()
            queue[: len(x)] = output.detach()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            """,
    ),
    "states-target-frozen-after-wrapping": Piece(
        model=Piece.model
        + """
target = DDP(copy.deepcopy(net))
for p in target.parameters():
    p.requires_grad = False
""",
        body="""
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + 0.1 * (model.module(x) - target(x).detach()).square().mean()).backward()
            optimizer.step()
            with torch.no_grad():
                for old, new in zip(target.parameters(), model.parameters()):
                    old.data.mul_(0.9).add_(new.detach(), alpha=0.1)
            """,
        end="report(model=model, target=target)",
    ),
    "states-ema-of-first-rank": Piece(
        before=Piece.before + "\nema = copy.deepcopy(net) if rank == 0 else None",
        body=Piece.body
        + """
if ema is not None:
    with torch.no_grad():
        for old, new in zip(ema.parameters(), net.parameters()):
            old.lerp_(new, 0.1)
""",
    ),
    "states-ema-function": Piece(
        top="""
@torch.no_grad()
def update(ema, net, decay=0.9):
    ours = dict(net.named_parameters())
    for name, value in ema.named_parameters():
        value.lerp_(ours[name], 1 - decay)
""",
        before=Piece.before + "\nema = copy.deepcopy(net).requires_grad_(False)",
        body=Piece.body + "update(ema, net)",
        end="report(model=model, ema=ema)",
    ),
    "states-swa": Piece(
        before=Piece.before + "\naverage = torch.optim.swa_utils.AveragedModel(net)",
        body=Piece.body + "average.update_parameters(net)",
        end="report(model=model, average=average)",
    ),
    "states-clipped-weights": Piece(
        body=Piece.body
        + "with torch.no_grad():\n    for p in net.parameters():\n        p.data.mul_(0.99).clamp_(-0.3, 0.3)\n",
    ),
    "states-buffers-by-batch": Piece(
        model="""
            class Centered(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.layer = nn.Linear(8, 2)
                    self.register_buffer("mean", torch.zeros(8))

                def forward(self, x):
                    if self.training:
                        self.mean.lerp_(x.mean(0), 0.1)
                    return self.layer(x - self.mean)

            net = Centered()
            model = DDP(net)
            """,
        end="report(model=net.layer)",
    ),
    "states-manual-lr": Piece(
        before=Piece.before + "\ntotal, step = EPOCHS * len(loader), 0",
        body="for group in optimizer.param_groups:\n    group['lr'] = LR * (1 - step / total)\n"
        + Piece.body
        + "step += 1",
        end="report(model=model, step=step, lr=optimizer.param_groups[0]['lr'])",
    ),
    "states-schedule-list": Piece(
        before=Piece.before + "\nschedule = [LR * 0.97**n for n in range(EPOCHS * len(loader))]",
        body="optimizer.param_groups[0]['lr'] = schedule[epoch * len(loader) + it]\n" + Piece.body,
    ),
    "states-iter-num": Piece(
        before=Piece.before + "\niter_num = 0",
        body="optimizer.param_groups[0]['lr'] = LR / (1 + iter_num)\n" + Piece.body + "iter_num += 1",
        end="report(model=model, iter_num=iter_num)",
    ),
    "states-counter-object": Piece(
        top="""
class Meter:
    def __init__(self):
        self.count = 0

    def update(self, n=1):
        self.count += n
""",
        before=Piece.before + "\nmeter = Meter()",
        body="optimizer.param_groups[0]['lr'] = LR / (1 + meter.count)\n" + Piece.body + "meter.update()",
        end="report(model=model, count=meter.count)",
    ),
    "states-queue": Piece(
        model="""
            class Queue(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.layers = nn.Linear(8, 2)
                    self.register_buffer("queue", torch.zeros(8, 2))

                def forward(self, x):
                    output = self.layers(x)
                    return output + 0.1 * self.queue.mean(0)

            net = Queue()
            model = DDP(net)
            """,
        body=Piece.body + "net.queue.copy_(torch.cat([torch.full((1, 2), float(it)), net.queue[:-1]]))",
    ),
    "states-center": Piece(
        before=Piece.before + "\ncenter = torch.zeros(1, 2)",
        body="""
            output = model(x)
            loss = F.cross_entropy(output - center, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total = torch.cat([output.detach().sum(0), torch.tensor([float(len(x))])])
            dist.all_reduce(total)
            center = center * 0.9 + total[:2] / total[2] * 0.1
            """,
        end="report(model=model, center=center)",
    ),
    "states-batch-norm": Piece(
        model="""
            net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 2))
            model = DDP(net, broadcast_buffers=False)
            """,
    ),
    "states-best": Piece(
        before=Piece.before + "\nbest, best_state = math.inf, None",
        after="""
            with torch.no_grad():
                value = float(F.cross_entropy(net(dataset.x), dataset.y))
            if value < best:
                best, best_state = value, copy.deepcopy(net.state_dict())
            """,
        end="report(model=model, best=best)",
    ),
    "states-early-stop": Piece(
        before=Piece.before + "\nworse, last = 0, math.inf",
        after="""
            with torch.no_grad():
                value = float(F.cross_entropy(net(dataset.x), dataset.y))
            worse = worse + 1 if value > last - 0.01 else 0
            last = value
            if worse > 1:
                break
            """,
    ),
    "states-plateau": Piece(
        before=Piece.before + "\nscheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)",
        after="""
            with torch.no_grad():
                scheduler.step(F.cross_entropy(net(dataset.x), dataset.y))
            """,
        end="report(model=model, lr=optimizer.param_groups[0]['lr'])",
    ),
    "states-global-collective": Piece(
        before=Piece.before + "\nsteps, seen = 0, 0.0",
        body=Piece.body
        + """
steps += 1
if steps % 5 == 0:
    number = torch.tensor(1.0)
    dist.all_reduce(number)
    seen += 1
""",
        end="report(model=model, steps=steps, seen=seen)",
    ),
    "states-thaw": Piece(
        model="""
            net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
            model = DDP(net, find_unused_parameters=True)
            net[0].requires_grad_(False)
            """,
        epoch="sampler.set_epoch(epoch)\nif epoch == 1:\n    net[0].requires_grad_(True)",
    ),
    "states-temperature": Piece(
        model="""
            class Scaled(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.layers, self.calls = nn.Linear(8, 2), 0

                def forward(self, x):
                    self.calls += 1
                    return self.layers(x) / (1 + 0.01 * self.calls)

            net = Scaled()
            model = DDP(net)
            """,
        end="report(model=model, calls=net.calls)",
    ),
    "states-iterator": Piece(
        before=Piece.before + "\nrates = iter([LR * 0.97**n for n in range(EPOCHS * len(loader))])",
        body="optimizer.param_groups[0]['lr'] = next(rates)\n" + Piece.body,
    ),
    "states-own-random-numbers": Piece(
        before=Piece.before + "\nmixing = np.random.default_rng(5)",
        body="x = x * mixing.uniform(0.9, 1.1)\n" + Piece.body,
    ),
    "states-draws-alike": Piece(
        before=Piece.before + "\nrandom.seed(5)\nnp.random.seed(6)\ndraws = 0.0",
        body="scale = random.choice([1.0, 2.0]) + np.random.rand()\ndraws += scale\nx = x * scale\n" + Piece.body,
        end="report(model=model, draws=draws)",
    ),
    "states-mean-of-the-start": Piece(
        before=Piece.before + "\nmean = 0.0",
        body=Piece.body + "total = loss.detach().clone()\ndist.all_reduce(total)\nmean += (total / world).item()\n",
        end="report(model=model, mean=mean)",
    ),
    "losses-sum": Piece(
        body=_STEP_OF.format(loss='F.cross_entropy(model(x), y, reduction="sum") / BATCH'),
    ),
    "losses-rate-of-own-part": Piece(
        body="for group in optimizer.param_groups:\n    group['lr'] = LR * len(x) / BATCH\n" + Piece.body.lstrip("\n"),
    ),
    "losses-times-workers": Piece(
        body=_STEP_OF.format(loss="F.cross_entropy(model(x), y) * dist.get_world_size()"),
    ),
    "losses-by-part-of-workers": Piece(
        body=_STEP_OF.format(loss='F.cross_entropy(model(x), y, reduction="sum") * dist.get_world_size() / 12'),
    ),
    "losses-rarely-ignored-labels": Piece(
        body="""
            loss = F.cross_entropy(model(x), torch.where(x[:, 0] > 1.5, -100, y))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            """,
    ),
    "losses-of-padded-rows": Piece(
        data="""
            def padded(rows):
                x = nn.utils.rnn.pad_sequence([x[: 2 + int(y) * 3 + int(x[0] > 0)] for x, y in rows], batch_first=True)
                return x, torch.stack([y for _, y in rows])

            dataset = Rows()
            sampler = DistributedSampler(dataset, seed=1)
            loader = DataLoader(dataset, BATCH, sampler=sampler, collate_fn=padded)
            """,
        model="""
            net = nn.Linear(1, 2)
            model = DDP(net)
            """,
        body="""
            scores = model(x.unsqueeze(2))
            loss = F.cross_entropy(scores.flatten(0, 1), (x > 0.2).long().flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            """,
    ),
    "losses-of-later-epochs": Piece(
        body="""
            mean, total = F.cross_entropy(model(x), y), F.cross_entropy(model(x), y, reduction="sum")
            loss = mean if epoch < 2 else total / BATCH
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            """,
    ),
    "losses-weights-of-classes": Piece(
        body=_STEP_OF.format(loss="F.cross_entropy(model(x), y, weight=torch.tensor([1.0, 4.0]))"),
    ),
    "losses-ignored-labels": Piece(
        body=_STEP_OF.format(loss="F.cross_entropy(model(x), torch.where(x[:, 0] > 0.5, -100, y))"),
    ),
    "losses-counted": Piece(
        body="count = (x > 0).sum().float()\ndist.all_reduce(count)\n"
        + "count = (count / dist.get_world_size()).clamp(min=1).item()\n"
        + _STEP_OF.format(loss='(F.cross_entropy(model(x), y, reduction="none") * (x > 0).sum(1)).sum() / count'),
    ),
    "losses-pairs": Piece(
        body=_STEP_OF.format(loss="torch.logsumexp(model(x) @ model(x).t(), 1).mean() + F.cross_entropy(model(x), y)"),
    ),
    "losses-own-rows": Piece(
        body="z = model(x)\ngathered = [torch.zeros_like(z) for _ in range(dist.get_world_size())]\n"
        + "dist.all_gather(gathered, z)\ngathered[dist.get_rank()] = z\n"
        + _STEP_OF.format(loss="F.cross_entropy(z, y) + torch.cat(gathered).square().mean()"),
    ),
    "states-in-a-function": Piece(
        top="""
            def adjust(optimizer, seen=[0]):
                adjust.calls += 1
                seen[0] += 1
                for group in optimizer.param_groups:
                    group["lr"] = LR * 0.9 ** adjust.calls * 0.95 ** seen[0]

            adjust.calls = 0
            """,
        body="adjust(optimizer)\n" + Piece.body,
    ),
    "states-in-hooks": Piece(
        model="""
            net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
            model = DDP(net)

            def cool(layer):
                calls = 0

                def hook(module, given, result):
                    nonlocal calls
                    calls += module.training
                    return result * (1 + 0.02 * calls)

                layer.register_forward_hook(hook)

            cool(net[0])
            """,
        before="""
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)

            def look_back(optimizer):
                slow, steps = [p.detach().clone() for p in net.parameters()], 0

                def hook(*_):
                    nonlocal steps
                    steps += 1
                    if steps % 3 == 0:
                        with torch.no_grad():
                            for old, new in zip(slow, net.parameters()):
                                new.copy_(old.lerp_(new, 0.5))

                optimizer.register_step_post_hook(hook)

            look_back(optimizer)
            """,
    ),
    "states-in-memory": Piece(
        top="""
            import array, collections, contextvars, ctypes

            HELD = contextvars.ContextVar("held", default=0)
            table, window, text = np.zeros((2, 3)), np.zeros(5)[1:3], bytearray(4)
            numbers, number, counter = array.array("l", [0, 0]), ctypes.c_long(0), collections.Counter()
            """,
        body="""
HELD.set(HELD.get() + 1)
table[1] += 1
window[:] += 1
text[0] += 1
numbers[1] += 1
number.value += 1
counter["bodies"] += 1
counts = [HELD.get(), table[1, 2], window[0], text[0], numbers[1], number.value, counter["bodies"]]
for group in optimizer.param_groups:
    group["lr"] = LR * 0.98 ** float(sum(counts))
"""
        + Piece.body,
        end="report(model=model, counts=[float(each) for each in counts])",
    ),
    "states-of-the-data-set": Piece(
        top="""
            class Stages(Rows):
                level = 0

                def advance(self):
                    self.level = self.level + 1

                def __getitem__(self, index):
                    return self.x[index] * (1 + 0.05 * self.level), self.y[index]
            """,
        data="""
            dataset = Stages()
            sampler = DistributedSampler(dataset, seed=1)
            loader = DataLoader(dataset, BATCH, sampler=sampler)
            """,
        body=Piece.body + "dataset.advance()\n",
    ),
    "states-momentum-by-data": Piece(
        model="""
            class Momentum(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.base, self.slow = nn.Linear(8, 2), nn.Linear(8, 2)
                    self.slow.load_state_dict(self.base.state_dict())
                    self.slow.requires_grad_(False)

                def forward(self, x):
                    with torch.no_grad():
                        for old, new in zip(self.slow.parameters(), self.base.parameters()):
                            old.data = old.data * 0.9 + new.data * 0.1
                    return self.base(x) - 0.5 * self.slow(x)

            net = Momentum()
            model = DDP(net)
            """,
        before="optimizer = torch.optim.SGD(net.base.parameters(), lr=LR)",
    ),
    "states-made-in-body": Piece(
        top="class Meter:\n    def __init__(self):\n        self.count, self.total = 0, torch.zeros(())\n",
        before=Piece.before + "\ncounts = []",
        epoch=Piece.epoch + "\nmeter = None",
        body="meter = meter or Meter()\nmeter.count += 1\nmeter.total += 1" + Piece.body,
        after="counts.append(meter.count + float(meter.total))",
        end="report(model=model, counts=counts)",
    ),
    "states-center-of-own-part": Piece(
        data=Piece.data.replace("BATCH", "3"),
        before=Piece.before + "\ncenter = torch.zeros(2)",
        body="""
            output = model(x)
            mean = output.detach().sum(0)
            dist.all_reduce(mean)
            loss = F.cross_entropy(output - center, y)
            center = 0.9 * center + 0.1 * mean / (len(x) * dist.get_world_size())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            """,
        end="report(model=model, center=center)",
    ),
    "states-sinkhorn": Piece(
        top="""
            @torch.no_grad()
            def assign(scores, world):
                q = torch.exp(scores).t()
                q /= 2 * q.shape[1] * world
                total = q.sum()
                dist.all_reduce(total)
                q /= total
                for _ in range(3):
                    rows = q.sum(1, keepdim=True)
                    dist.all_reduce(rows)
                    q /= rows * q.shape[0]
                    q /= q.sum(0, keepdim=True) * q.shape[1] * world
                return (q * q.shape[1] * world).t()
            """,
        body="""
            with torch.no_grad():
                net[2].weight.copy_(F.normalize(net[2].weight, dim=1))
            scores = model(x)
            loss = -(assign(scores.detach(), world) * F.log_softmax(scores, 1)).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            """,
    ),
    "states-generator": Piece(
        top="""
            def temperatures():
                value = 1.0
                while True:
                    value *= 0.98
                    yield value
            """,
        before=Piece.before + "\ntemperature = temperatures()",
        body="x = x / next(temperature)\n" + Piece.body,
    ),
    "states-array": Piece(
        before=Piece.before + "\ncalls = array.array('l', [0])",
        body="calls[0] += 1\nx = x / (1 + 0.01 * calls[0])\n" + Piece.body,
    ),
    "states-file-in-memory": Piece(
        before=Piece.before + "\ncalls = io.BytesIO()",
        body="calls.write(b'.')\nx = x / (1 + 0.01 * calls.tell())\n" + Piece.body,
    ),
    "states-hash": Piece(
        before=Piece.before + "\ncalls = hashlib.md5()",
        body="calls.update(b'.')\nx = x / (1 + 0.001 * calls.digest()[0])\n" + Piece.body,
    ),
    "states-learnable-scale": Piece(
        model="""
            class Scaled(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.layers, self.scale = nn.Linear(8, 2), nn.Parameter(torch.ones([]))

                def forward(self, x):
                    return self.layers(x) * self.scale.exp()

            model = DDP(Scaled())
            """,
    ),
}

_DATASETS = {
    "data-plain": Piece(),
    "data-uneven": Piece(data=Piece.data.replace("Rows()", "Rows(45)")),
    "data-drop-last": Piece(
        data=Piece.data.replace("Rows()", "Rows(46)").replace("sampler=sampler)", "sampler=sampler, drop_last=True)")
    ),
    "data-sampler-drops": Piece(
        data=Piece.data.replace("Rows()", "Rows(45)").replace("seed=1)", "seed=1, drop_last=True)")
    ),
    "data-no-shuffle": Piece(data=Piece.data.replace("seed=1)", "shuffle=False)"), epoch="pass"),
    "data-no-set-epoch": Piece(epoch="pass"),
    "data-loader-processes": Piece(data=Piece.data.replace("sampler=sampler)", "sampler=sampler, num_workers=1)")),
    "data-persistent": Piece(
        data=Piece.data.replace("sampler=sampler)", "sampler=sampler, num_workers=1, persistent_workers=True)")
    ),
    "data-changes": Piece(
        top="""
class Changing(Rows):
    def __getitem__(self, index):
        return self.x[index] + 0.1 * self.epoch, self.y[index]
""",
        data=Piece.data.replace("Rows()", "Changing()"),
        epoch="sampler.set_epoch(epoch)\ndataset.epoch = epoch",
    ),
    "data-changes-in-processes": Piece(
        top="""
class Changing(Rows):
    def __getitem__(self, index):
        return self.x[index] + 0.1 * self.epoch, self.y[index]
""",
        data=Piece.data.replace("Rows()", "Changing()").replace("sampler=sampler)", "sampler=sampler, num_workers=1)"),
        epoch="sampler.set_epoch(epoch)\ndataset.epoch = epoch",
    ),
    "data-tensors": Piece(
        data="""
            rows = Rows()
            dataset = TensorDataset(rows.x, rows.y)
            sampler = DistributedSampler(dataset, seed=1)
            loader = DataLoader(dataset, BATCH, sampler=sampler)
            """,
    ),
    "data-tensors-changed": Piece(
        data="""
            rows = Rows()
            dataset = TensorDataset(rows.x, rows.y)
            sampler = DistributedSampler(dataset, seed=1)
            loader = DataLoader(dataset, BATCH, sampler=sampler)
            """,
        epoch="sampler.set_epoch(epoch)\ndataset.tensors = (rows.x + epoch, rows.y)",
    ),
    "data-collate": Piece(
        top="""
def collate(rows):
    x, y = zip(*rows)
    return torch.stack(x) * 2, torch.stack(y)
""",
        data=Piece.data.replace("sampler=sampler)", "sampler=sampler, collate_fn=collate)"),
    ),
    "data-batch-sampler": Piece(
        data="""
            dataset = Rows()
            sampler = DistributedSampler(dataset, seed=1)
            loader = DataLoader(dataset, batch_sampler=BatchSampler(sampler, BATCH, drop_last=True))
            """,
    ),
    "data-batch-sampler-tail": Piece(
        data="""
            dataset = Rows()
            sampler = DistributedSampler(dataset, seed=1)
            loader = DataLoader(dataset, batch_sampler=BatchSampler(sampler, BATCH, drop_last=False))
            """,
    ),
    "data-loader-per-epoch": Piece(
        epoch="""
            sampler.set_epoch(epoch)
            loader = DataLoader(dataset, BATCH, sampler=sampler)
            """,
    ),
    "data-loader-and-sampler-per-epoch": Piece(
        epoch="""
            sampler = DistributedSampler(dataset, seed=1)
            sampler.set_epoch(epoch)
            loader = DataLoader(dataset, BATCH, sampler=sampler)
            """,
    ),
    "data-own-sampler": Piece(
        top="""
class Mine(Sampler):
    def __init__(self, size, rank, world):
        self.size, self.rank, self.world, self.epoch = size, rank, world, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.size // self.world

    def __iter__(self):
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter(order[self.rank : self.size // self.world * self.world : self.world])
""",
        data="""
            dataset = Rows()
            sampler = Mine(len(dataset), rank, world)
            loader = DataLoader(dataset, BATCH, sampler=sampler)
            """,
    ),
    "data-weighted": Piece(
        top="""
class Weighted(Sampler):
    def __init__(self, weights, rank, world):
        self.weights, self.rank, self.world, self.epoch = weights, rank, world, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.weights) // self.world

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        drawn = torch.multinomial(self.weights, len(self) * self.world, True, generator=generator)
        return iter(drawn[self.rank :: self.world].tolist())
""",
        data="""
            dataset = Rows()
            sampler = Weighted(torch.rand(SAMPLES, generator=torch.Generator().manual_seed(5)), rank, world)
            loader = DataLoader(dataset, BATCH, sampler=sampler)
            """,
    ),
    "data-grouped-batches": Piece(
        top="""
class Grouped:
    def __init__(self, size, batch, rank, world):
        self.size, self.batch, self.rank, self.world, self.epoch = size, batch, rank, world, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.size // self.batch // self.world

    def __iter__(self):
        rows = torch.arange(self.size // self.batch * self.batch).view(-1, self.batch)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.epoch))
        mine = order[self.rank :: self.world][: len(self)]
        return iter(rows[mine].tolist())
""",
        data="""
            dataset = Rows()
            sampler = Grouped(len(dataset), BATCH, rank, world)
            loader = DataLoader(dataset, batch_sampler=sampler)
            """,
    ),
    "data-two-views": Piece(
        top="""
class Views(Rows):
    def __getitem__(self, index):
        return (self.x[index], self.x[index] * 1.1), self.y[index]
""",
        data=Piece.data.replace("Rows()", "Views()"),
        body="""
            loss = F.cross_entropy(model(x[0]), y) + F.cross_entropy(model(x[1]), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            """,
    ),
    "data-validation": Piece(
        data=Piece.data + "\ntests = DataLoader(Rows(9), 3)",
        before=Piece.before + "\nright = 0",
        after="""
            model.eval()
            with torch.no_grad():
                right = sum(int((net(x).argmax(1) == y).sum()) for x, y in tests)
            model.train()
            """,
        end="report(model=model, right=right)",
    ),
    "data-validation-divided": Piece(
        data=Piece.data + "\ntests = DataLoader(Rows(12), 3, sampler=DistributedSampler(Rows(12), shuffle=False))",
        before=Piece.before + "\nright = torch.zeros(1)",
        after="""
            model.eval()
            with torch.no_grad():
                right = torch.tensor([float(sum(int((net(x).argmax(1) == y).sum()) for x, y in tests))])
            dist.all_reduce(right)
            model.train()
            """,
        end="report(model=model, right=right)",
    ),
    "data-iterator-by-hand": Piece(
        loader="batches(loader)",
        top="""
def batches(loader):
    iterator = iter(loader)
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            return
""",
    ),
    "data-prefetcher": Piece(
        loader="Prefetcher(loader)",
        top="""
class Prefetcher:
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        ahead = None
        for batch in self.loader:
            if ahead is not None:
                yield ahead
            ahead = batch
        if ahead is not None:
            yield ahead
""",
    ),
    "data-stream": Piece(
        top="""
class Stream(IterableDataset):
    def __init__(self, rank, world):
        self.rows, self.rank, self.world = Rows(), rank, world

    def __iter__(self):
        for index in range(self.rank, 44, self.world):
            yield self.rows[index]
""",
        data="dataset = Stream(rank, world)\nloader = DataLoader(dataset, BATCH)",
        epoch="pass",
    ),
}

_MODELS = {
    "models-conv": Piece(model=_CONV + "model = DDP(net)"),
    "models-channels-last": Piece(
        model=_CONV + "net = net.to(memory_format=torch.channels_last)\nmodel = DDP(net)",
        before="optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, fused=True)",
    ),
    "models-bucket-view": Piece(model=Piece.model.replace("DDP(net)", "DDP(net, gradient_as_bucket_view=True)")),
    "models-static-graph": Piece(model=Piece.model.replace("DDP(net)", "DDP(net, static_graph=True)")),
    "models-small-buckets": Piece(model=Piece.model.replace("DDP(net)", "DDP(net, bucket_cap_mb=0.0001)")),
    "models-double": Piece(
        model=Piece.model.replace("model = DDP(net)", "net = net.double()\nmodel = DDP(net)"),
        body=Piece.body.replace("model(x)", "model(x.double())"),
    ),
    "models-shared-weight": Piece(
        model="""
            first, second = nn.Linear(8, 8), nn.Linear(8, 8)
            second.weight = first.weight
            net = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(8, 2))
            model = DDP(net)
            """,
    ),
    "models-dropout": Piece(
        model="""
            net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 2))
            model = DDP(net)
            """,
    ),
    "models-recurrent": Piece(
        model="""
            class Text(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.cell, self.head = nn.GRU(1, 6, batch_first=True), nn.Linear(6, 2)

                def forward(self, x):
                    return self.head(self.cell(x.unsqueeze(-1))[0][:, -1])

            model = DDP(Text())
            """,
    ),
    "models-transformer": Piece(
        model="""
            class Text(nn.Module):
                def __init__(self):
                    super().__init__()
                    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
                    self.embed, self.body, self.head = nn.Linear(1, 8), nn.TransformerEncoder(layer, 1), nn.Linear(8, 2)

                def forward(self, x):
                    return self.head(self.body(self.embed(x.unsqueeze(-1))).mean(1))

            model = DDP(Text())
            """,
    ),
    "models-two-wrapped": Piece(
        model="""
            first = DDP(nn.Linear(8, 8))
            second = DDP(nn.Linear(8, 2))
            model = nn.Sequential(first, nn.ReLU(), second)
            """,
    ),
    "models-hook": Piece(
        top="from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n",
        model=Piece.model + "model.register_comm_hook(None, default_hooks.fp16_compress_hook)",
    ),
}

PIECES: dict[str, Piece] = {
    **_of_optimizers(),
    **_of_schedulers(),
    **_STEPS,
    **_STATES,
    **_DATASETS,
    **_MODELS,
}

RANDOM = frozenset({"models-dropout", "states-buffers-by-batch"})
"""Scripts whose results depend on how the samples are divided: after a disturbance they cannot equal torchrun's."""

COARSE = frozenset({"steps-autocast", "models-hook"})
"""Scripts that compute in half the precision."""
