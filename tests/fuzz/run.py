"""Fuzzing for long: `make fuzz INPUTS=1000000 SEED=1`. One input of a hundred goes through a port, the others straight
to what decodes it. It ends with the first input that raises anything but the error that is expected for bad data."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from farandole.job.launch.certificates_command import make_certificates
from tests.fuzz.decoders import Decoding, bounded_memory
from tests.fuzz.ports import Ports

MOST_MEMORY = 128 << 20
_ROUND = 50_000  # inputs between two lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    options = parser.parse_args()
    began_s, done = time.monotonic(), 0
    while done < options.inputs:
        seed = options.seed + done // _ROUND
        with bounded_memory(MOST_MEMORY):
            fuzz(seed, _ROUND)
        done += _ROUND
        print(f"seed {seed}: {done} inputs, {time.monotonic() - began_s:.0f} s", flush=True)


def fuzz(seed: int, inputs: int) -> dict[str, int]:
    """Try the inputs that follow from the seed. Returns how many each decoder refused."""
    decoding = Decoding(seed)
    try:
        refused = decoding.run(inputs - inputs // 100)
    finally:
        decoding.close()
    with tempfile.TemporaryDirectory() as folder:
        make_certificates(Path(folder))
        for tls in (None, folder):
            ports = Ports(seed, tls)
            try:
                ports.fuzz(inputs // 200)
                ports.check()
            finally:
                ports.close()
    return refused


if __name__ == "__main__":
    main()
