"""The bodies of the gallery by name: which script, and what must come of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tests.gallery.record import STATISTICS
from tests.gallery.worker import BODIES as FOLDER


@dataclass(frozen=True)
class Body:
    """One script in one of its kinds.

    witness   what each sample adds to its entry of `seen` in the whole job, where the optimizer leaves it alone
    is_padded  whether a few samples are repeated at the end of an epoch, to divide it equally, as Horovod does
    is_exact  whether its result does not depend on how batches are divided among workers
    own       names of tracked values that are means over workers, taken behind a decided step: they may lack the value
              of one that is lost, and are compared among the workers only
    local     names of tracked values that each worker has for itself
    refused   the job has to end, with an error that has these words; also when nothing happens to it
    refused_in_strict_mode  the same in strict mode
    by_run    names of tracked values that depend, in strict mode, on the shards that a worker has: counters of loop
              bodies, and means over workers, which are rounded
    is_slow   it compiles, or starts processes
    horovod   it runs under the commit rule
    alone     whether one worker does the same as several
    """

    name: str
    file: str
    arguments: tuple[str, ...] = ()
    witness: float | None = None
    is_padded: bool = False
    is_exact: bool = True
    own: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    refused: str = ""
    refused_in_strict_mode: str = ""
    by_run: tuple[str, ...] = ()
    is_slow: bool = False
    horovod: bool = False
    alone: bool = True

    @property
    def fits_chaos(self) -> bool:
        """Whether it can have more samples and steps, with the order of its samples known by its definition alone."""
        is_other = self.horovod or self.is_slow or bool(self.refused) or not self.is_exact
        return not is_other and self.file not in ("data.py", "rl.py", "bad.py") and self.name not in _NOT_LONG

    @property
    def fits_strict_mode(self) -> bool:
        """Whether it has a loader, and no loss that depends on what other workers compute at the same time."""
        return not self.horovod and self.name != "averages-moco"

    @property
    def path(self) -> str:
        return str(FOLDER / self.file)


# Shorter epochs than others have; and steps of a size that a sign decides, which rounding turns around.
_NOT_LONG = ("evaluation-stop", "optimizers-rprop")
_ONCE = -0.1 * 2 / 12  # plain SGD with lr 0.1, batches of 12, two epochs


def _bodies(file: str, *kinds: str, **options: Any) -> list[Body]:
    return [Body(f"{file}-{kind}", f"{file}.py", (kind,), **options) for kind in kinds]


_ALL = [
    *_bodies("plain", "readme", "none", "enumerate", "zip", "tqdm", "chain", witness=_ONCE),
    *_bodies("amp", "plain", "unscale", "if", "if-unscale", "inf"),
    *_bodies("amp", "autocast", "bfloat16", is_exact=False),
    *_bodies("accumulation", "chunks", own=("model.seen",)),
    *_bodies("accumulation", "micro", "micro-if", "local", "micro-clip", own=("applied",)),
    *_bodies("clipping", "norm", "strict", "value", "noise", "log", "adaptive", "skip", "data", "centralize"),
    *_bodies("passes", "two-passes", "retain", "losses", "penalty", "checkpoint-reentrant", "checkpoint"),
    *_bodies("passes", "checkpoint-sequential", "grad", "inputs", "hooks", "unused"),
    *_bodies(
        "averages", "before", "after", "if-applied", "callback", "averaged", "swa", "swa-epoch", "teacher", "byol"
    ),
    *_bodies("averages", "swapped", "tensors", "new-tensors", own=("scores",)),
    *_bodies(
        "averages", "by-data", "in-data", "in-data-before", "in-data-late", "exchanged", "loaded", own=("scores",)
    ),
    *_bodies("averages", "moco", own=("queue",)),
    *_bodies("averages", "swa-norm", is_exact=False, local=STATISTICS),
    *_bodies("gan", "one", witness=_ONCE),
    *_bodies("gan", "two", "wgan"),
    *_bodies("schedules", "body", "applied", "callback", "chained", "sequential", "onecycle", "by-hand"),
    *_bodies(
        "schedules",
        "epoch",
        "mean",
        "callback-mean",
        "callback-two",
        "plateau-callback",
        "plateau-body",
        "plateau-epoch",
    ),
    *_bodies("evaluation", "end", "once", "best", "named", "once-mean"),
    *_bodies("evaluation", "middle", own=("scores",)),
    *_bodies("evaluation", "save-rank-0", "save-once", "stop", "any", "barrier", "gather"),
    *_bodies("evaluation", "metrics", own=("scores",)),
    *_bodies(
        "around", "finally", "except-own", "with", "thread", "signal", "random", "closure", "anomaly", witness=_ONCE
    ),
    *_bodies("around", "zero-after", "model-zero", "generator", "subprocess", "fork", witness=_ONCE),
    *_bodies("data", "sequential", "stratified", "bucketed", "workers", "collate", "stream", "growing", witness=_ONCE),
    *_bodies("data", "augmented", "layernorm", "syncbn", witness=_ONCE),
    *_bodies("data", "weighted", "short", "carry", "drop"),
    *_bodies("data", "dropout", "batchnorm", is_exact=False, witness=_ONCE),
    *_bodies("parts", "weight-norm", "old-weight-norm", "orthogonal", "frozen", "groups", "unfreeze", "tied"),
    *_bodies("parts", "extra", "spectral-norm", "values-before", "values-between", "values-after"),
    *_bodies("parts", "tensor-before", "tensor-after", "unconditional"),
    *_bodies("optimizers", "adamw", "adamw-fused", "adam-foreach", "rmsprop", "adagrad", "nadam", "radam", "adadelta"),
    *_bodies("optimizers", "asgd", "rprop", "nesterov", "sam", "lookahead", "project"),
    *_bodies("optimizers", "warm-up", "weight-noise", "reset", "decay-between", "decay-data", "lowered"),
    *_bodies("optimizers", "lbfgs", refused="closure"),
    *_bodies("rl", "plain", "returns"),
    *_bodies("ddp", "plain", "view", "micro", "log", "ema", "scheduler", "metrics", "all-reduce", witness=_ONCE),
    *_bodies("ddp", "micro-log", "micro-view-log", witness=_ONCE),
    *_bodies("ddp", "no-sync", own=("model.seen",)),
    *_bodies("ddp", "clip", "scaler", "scaler-clip", "scaler-micro"),
    *_bodies("hvd", "each", "plain", horovod=True, is_exact=False, witness=-0.1 * 2 / 2, is_padded=True),
    *_bodies("hvd", "metrics", horovod=True, is_exact=False, own=("losses",), witness=-0.1 * 2 / 2, is_padded=True),
    *_bodies("hvd", "clip", "schedule", horovod=True, is_exact=False),
    *_bodies("compiled", "eager", "inductor", is_slow=True),
    *_bodies("bad", "swallow", "swallow-collective", "replace-grad", "requires-grad", "re-enter", "untracked"),
    *_bodies("bad", "fork-train"),
    *_bodies("bad", "twice", refused="StepError"),
    *_bodies("bad", "continue"),  # all leave out the same batch
    *_bodies("bad", "no-step", refused="StepError"),
    *_bodies("bad", "one-rank", refused="fd.mean|mean"),
]

_TWO_PASSES = "a second backward pass for the same batch, in strict mode"
_REFUSED_IN_STRICT_MODE = {
    **dict.fromkeys(("passes-retain", "passes-two-passes", "gan-two", "gan-wgan", "optimizers-sam"), _TWO_PASSES),
    "ddp-no-sync": _TWO_PASSES,
    "data-stream": "--strict: the samples of a Stream",
    "data-syncbn": "strict mode: SyncBatchNorm",
    "averages-in-data-late": "changed in a run of the loop body whose optimizer.step.. made no step",
}
_COUNTERS = ("array", "count", "log", "names", "pair", "sets", "table", "tensors", "total", "window")
_BY_RUN = {
    **dict.fromkeys(("parts-values-before", "parts-values-between", "parts-tensor-before"), _COUNTERS),
    "parts-unconditional": _COUNTERS,
    "averages-tensors": ("shadow",),
    **dict.fromkeys(("evaluation-end", "evaluation-once", "evaluation-best"), ("scores", "best")),
    "evaluation-save-once": ("saved",),
    "ddp-metrics": ("total",),
}

BODIES = {
    body.name: replace(
        body, refused_in_strict_mode=_REFUSED_IN_STRICT_MODE.get(body.name, ""), by_run=_BY_RUN.get(body.name, ())
    )
    for body in _ALL
}
