"""Joins a job, leaves it and joins again; prints the identity of both generations for a test to read."""

from __future__ import annotations

import sys

import farandole as fd
from farandole.collectives import world

nonces = []
for _ in range(2):
    fd.init()
    nonces.append(world.current().id.nonce)
    fd.shutdown()
sys.stdout.write(f"NONCES {' '.join(nonces)}\n")  # in one piece: several ranks write to one pipe
