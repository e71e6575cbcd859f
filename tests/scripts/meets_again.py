"""Joins a job, leaves it and joins again; prints what it heard from all ranks both times, for a test to read."""

from __future__ import annotations

import sys

import farandole as fd
from farandole.training.collectives import world

heard = []
for factor in (1, 10):
    fd.init()
    rank = fd.rank()
    said = world.current().transport.all_gather(str(rank * factor).encode())
    heard.append([int(each) for each in said])
    fd.shutdown()
sys.stdout.write(f"RANK {rank} HEARD {heard[0]} {heard[1]}\n")  # in one piece: several ranks write to one pipe
