"""A small elastic job whose workers come to grief: `--at SLOT:STEP:WHAT`, for the first worker of a slot."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import farandole as fd
from farandole.base.liveness import exit_notice, status_reporting
from farandole.base.liveness.status_reporting import MUTEX_AT
from farandole.testing.quick_start import without_compiler
from farandole.testing.step_records import Records

LONG_S = 1000


def spin_with_the_interpreter_locked() -> None:
    while True:  # a signal ends a sleep
        ctypes.PyDLL(None).sleep(LONG_S)  # a PyDLL keeps Python's lock while C runs


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    with lock:
        lock.acquire()


def end_the_main_thread_only() -> None:
    threading.Thread(target=time.sleep, args=(LONG_S,)).start()
    ctypes.CDLL(None).syscall(60, 0)  # exit, of this thread


def scribble_over_the_page() -> None:
    assert status_reporting.OWN.page is not None
    word = status_reporting.OWN.page.memory[MUTEX_AT : MUTEX_AT + 4]
    died = int.from_bytes(word, "little") | 1 << 30
    status_reporting.OWN.page.memory[MUTEX_AT : MUTEX_AT + 4] = died.to_bytes(4, "little")
    exit_notice.wake(ctypes.addressof(ctypes.c_char.from_buffer(status_reporting.OWN.page.memory, MUTEX_AT)))


GRIEF: dict[str, Callable[[], object]] = {
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda: os._exit(5),
    "sys-exit": lambda: sys.exit(6),
    "spin": spin_with_the_interpreter_locked,
    "sleep": lambda: time.sleep(LONG_S),
    "lock": wait_for_a_lock,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "pause": lambda: time.sleep(1.0),
    "alone": lambda: fd.allreduce(torch.ones(1), name="alone"),  # a collective that the others do not call
    "scribble": scribble_over_the_page,
    "half": end_the_main_thread_only,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--at", action="append", default=[], metavar="SLOT:STEP:WHAT")
    parser.add_argument("--samples", type=int, default=240)
    parser.add_argument("--records")
    options = parser.parse_args()
    acts = [(int(slot), int(step), what) for slot, step, what in (each.split(":") for each in options.at)]

    torch.set_num_threads(1)
    torch.manual_seed(0)
    without_compiler()
    fd.init()
    is_first = fd.generation() == 1
    numbers = torch.linspace(-1, 1, options.samples).unsqueeze(1)
    model = torch.nn.Linear(1, 1)
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    dataset = torch.utils.data.TensorDataset(numbers, 2 * numbers)
    loader = fd.elastic.DataLoader(dataset, global_batch_size=12, seed=0)
    state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
    records = Records(options.records) if options.records else None

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> None:
        for _ in loader.epochs(1):
            for x, y in loader:
                if records is not None:
                    records.before_step(state)
                optimizer.zero_grad()
                for act in acts:
                    if is_first and act[:2] == (fd.slot(), state.step):
                        acts.remove(act)
                        GRIEF[act[2]]()
                F.mse_loss(model(x), y).backward()
                if optimizer.step() and records is not None:
                    records.after_step(state)

    train(state)
    if records is not None:
        records.at_end(state)


if __name__ == "__main__":
    main()
