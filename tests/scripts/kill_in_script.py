"""Runs a script as it is, and lets a worker of the job be killed in it: kill_in_script.py MARK CALL SCRIPT ARGUMENTS

The first worker that computes its CALLth cross entropy kills itself, once in the job: MARK is a file that is there from
then on. The worker that goes on alone takes longer for each batch, up to two seconds, so that the replacement joins
before the end of the training, however busy the machine is.
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
ALONE = 2  # the number of the generation after the kill

compute, calls, calls_alone = F.cross_entropy, 0, 0


def cross_entropy(*arguments: Any, **keywords: Any) -> torch.Tensor:
    global calls, calls_alone
    calls += torch.is_grad_enabled()
    if calls == CALL and not MARK.exists():
        try:
            MARK.touch(exist_ok=False)
        except FileExistsError:  # another worker was faster
            pass
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    if fd.is_initialized() and fd.generation() == ALONE:
        calls_alone += 1
        time.sleep(min(2.0, 0.1 * calls_alone))
    return compute(*arguments, **keywords)


F.cross_entropy = cross_entropy
sys.argv = sys.argv[3:]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
