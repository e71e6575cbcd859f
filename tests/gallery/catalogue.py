"""The bodies of the gallery by name: which script, and what must come of it."""

from __future__ import annotations

from dataclasses import dataclass

from tests.gallery.worker import BODIES as FOLDER


@dataclass(frozen=True)
class Body:
    """One script in one of its kinds.

    witness   what each sample adds to its entry of `seen` in the whole job, where the optimizer leaves it alone
    is_exact  whether its result does not depend on how batches are divided among workers
    own       names of tracked values that are means over workers, taken behind a decided step: they may lack the value of
              one that is lost, and are compared among the workers only
    local     names of tracked values that each worker has for itself
    refused   the job has to end, with an error that has these words; also when nothing happens to it
    is_slow   it compiles, or starts processes
    horovod   it runs under the commit rule
    alone     whether one worker does the same as several
    """

    name: str
    file: str
    arguments: tuple[str, ...] = ()
    witness: float | None = None
    is_exact: bool = True
    own: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    refused: str = ""
    is_slow: bool = False
    horovod: bool = False
    alone: bool = True

    @property
    def path(self) -> str:
        return str(FOLDER / self.file)


_ONCE = -0.1 * 2 / 12  # plain SGD with lr 0.1, batches of 12, two epochs

_ALL = [
    *(Body(f"plain-{kind}", "plain.py", (kind,), witness=_ONCE)
      for kind in ("readme", "none", "enumerate", "zip", "tqdm", "chain")),
    *(Body(f"amp-{kind}", "amp.py", (kind,), is_exact=kind not in ("autocast", "bfloat16"))
      for kind in ("plain", "unscale", "if", "if-unscale", "inf", "autocast", "bfloat16")),
]

BODIES = {body.name: body for body in _ALL}
