"""Runs a script as it is, and lets a worker of the job be killed in it: kill_in_script.py MARK CALL SCRIPT ARGUMENTS

The first worker that computes its CALLth cross entropy kills itself, once in the job: MARK is a file that is there from
then on. A worker that trains on in the generation after that takes half a second for each batch, so that the
replacement joins long before the end.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import farandole as fd

MARK, CALL = Path(sys.argv[1]), int(sys.argv[2])
AFTER_THE_KILL = 2  # the number of the generation

compute, calls = F.cross_entropy, 0


def cross_entropy(*arguments: Any, **keywords: Any) -> torch.Tensor:
    global calls
    calls += torch.is_grad_enabled()
    if calls == CALL and not MARK.exists():
        try:
            MARK.touch(exist_ok=False)
        except FileExistsError:  # another worker was faster
            pass
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    if fd.is_initialized() and fd.generation() == AFTER_THE_KILL:
        time.sleep(0.5)
    return compute(*arguments, **keywords)


F.cross_entropy = cross_entropy
sys.argv = sys.argv[3:]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
