"""A part of the fuzzing, of some seconds: `make fuzz` tries millions of inputs."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

from farandole.base.membership import GenerationId
from farandole.base.wire.authentication import SUBJECT_LIMIT, Introduction, decode_introduction
from farandole.base.wire.frames import AGENT_MESSAGES, WORKER_MESSAGES, decode
from farandole.errors import ProtocolError
from tests.fuzz.decoders import Decoding, bounded_memory
from tests.fuzz.ports import Ports
from tests.fuzz.run import MOST_MEMORY
from tests.support.certificates import made

SEED = int(os.environ.get("FUZZ_SEED", random.randrange(10**9)))


@pytest.fixture(autouse=True)
def _say_the_seed() -> None:
    print(f"FUZZ_SEED={SEED}")


def test_whatever_arrives_is_refused_with_the_error_for_bad_data() -> None:
    decoding = Decoding(SEED)
    try:
        with bounded_memory(MOST_MEMORY):
            refused = decoding.run(40_000)
    finally:
        decoding.close()
    assert refused["sealed frames"] == 4000
    assert refused["messages"] > 1000


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets")
@pytest.mark.parametrize("has_tls", [False, True])
def test_every_port_serves_as_before_after_garbage(tmp_path: Path, has_tls: bool) -> None:
    ports = Ports(SEED, made(tmp_path / "tls") if has_tls else None)
    try:
        with bounded_memory(MOST_MEMORY):
            ports.fuzz(600)
            ports.check()
    finally:
        ports.close()


@pytest.mark.parametrize("nested", [b"\x91", b"\x81\xa0"])
def test_arrays_in_arrays_without_end_are_bad_data(nested: bytes) -> None:
    """They end msgspec with RecursionError, which is no ValueError."""
    for decoder in (AGENT_MESSAGES, WORKER_MESSAGES):
        with pytest.raises(ProtocolError, match="not a valid message"):
            decode(decoder, b"\x81\xa4type" + nested * 100_000)
        with pytest.raises(ProtocolError, match="not a valid message"):
            decode(decoder, b"\x81\xa1x" + nested * 100_000)


def test_an_introduction_of_nested_arrays_is_none() -> None:
    """A stranger may send one to each worker."""
    valid = Introduction(GenerationId(1, 1, 1, ""), "", "").encode()
    subject = bytes([valid[0] + 1]) + valid[1:]  # an array with one more item
    subject += b"\x91" * (SUBJECT_LIMIT - len(subject))
    with pytest.raises(ProtocolError, match="not an introduction"):
        decode_introduction(subject)
