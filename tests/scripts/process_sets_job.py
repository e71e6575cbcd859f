"""An elastic job with process sets, made in all three ways; records what they are and do, batch by batch.

To be run with HOROVOD_DYNAMIC_PROCESS_SETS=1 and 3 workers.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

import farandole as fd
from farandole.integrations.horovod.named.process_sets import process_set_ids_and_ranks


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stop", type=Path, required=True, help="train until this file exists")
    parser.add_argument("--remove", type=Path, required=True, help="take one process set away once this file exists")
    parser.add_argument("--records")
    options = parser.parse_args()
    file = os.open(Path(options.records) / f"worker-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    torch.set_num_threads(1)
    given = fd.ProcessSet([0, 1])
    fd.init(process_sets=[given])
    sets = {"given": given, "before": fd.add_process_set([1, 2])}
    state = fd.elastic.ObjectState(fd.broadcast_object, fd.rank, batch=0, is_removed=False)

    @fd.elastic.run
    def train(state: Any) -> None:
        sets.pop("inside", None)
        if fd.size() == 3:
            sets["inside"] = fd.add_process_set([0, 2])  # each time that the function is entered, as Horovod needs it
        while not fd.any(options.stop.exists()):
            if fd.size() == 3 and not state.is_removed and fd.any(options.remove.exists()):
                fd.remove_process_set(sets["before"])
                state.is_removed = True
            sums = {name: summed(each) for name, each in sets.items()}
            state.batch += 1
            state.commit()
            record = {
                "batch": state.batch,
                "generation": fd.generation(),
                "rank": fd.rank(),
                "size": fd.size(),
                "pid": os.getpid(),
                "ids": {name: each.process_set_id for name, each in sets.items()},
                "sizes": {name: each.size() for name, each in sets.items()},
                "sums": sums,
                "all": process_set_ids_and_ranks(),
                "is_removed": state.is_removed,
            }
            os.write(file, json.dumps(record).encode() + b"\n")  # one write, so that it survives a kill -9

    train(state)


def summed(members: fd.ProcessSet) -> int | str | None:
    """The sum of the ranks in it; None on other ranks; where it does not exist, the error."""
    if members.process_set_id is not None and not members.included():
        return None
    try:
        return int(fd.allreduce(torch.tensor(fd.rank()), op=fd.Sum, process_set=members))
    except ValueError as error:
        return str(error)


if __name__ == "__main__":
    main()
