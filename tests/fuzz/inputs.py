"""Valid messages, and what becomes of bytes on their way: the inputs of the fuzzing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, get_args

import msgspec
from msgspec import inspect

from farandole.base.wire.control import ClientMessage, ToClient
from farandole.base.wire.frames import encode
from farandole.base.wire.link_messages import ToWorker, WorkerMessage
from farandole.base.wire.messages import AgentMessage, ToAgent

_NUMBERS = (0, 1, -1, 127, 255, 65535, 2**31 - 1, 2**32, 2**53, 2**63 - 1, -(2**63), 10**9)
_TEXTS = ("", "w0", "127.0.0.1", "ä" * 20, "\0", "x" * 300)


def sample(kind: inspect.Type, random_: random.Random, depth: int = 0) -> Any:
    """Return a value of a type."""
    match kind:
        case inspect.IntType():
            return random_.choice(_NUMBERS)
        case inspect.FloatType():
            return random_.choice((0.0, -1.5, 1e300, float("inf"), float("nan")))
        case inspect.StrType():
            return random_.choice(_TEXTS)
        case inspect.BytesType():
            return random_.randbytes(random_.choice((0, 1, 32, 300)))
        case inspect.BoolType():
            return random_.random() < 0.5
        case inspect.NoneType():
            return None
        case inspect.LiteralType(values):
            return random_.choice(values)
        case inspect.EnumType(cls):
            return random_.choice(list(cls))
        case inspect.UnionType(types):
            return sample(random_.choice(types), random_, depth)
        case inspect.VarTupleType(item) | inspect.ListType(item):
            return tuple(sample(item, random_, depth + 1) for _ in range(random_.randrange(4 if depth < 4 else 1)))
        case inspect.TupleType(items):
            return tuple(sample(each, random_, depth + 1) for each in items)
        case inspect.DictType(key, value):
            return {sample(key, random_): sample(value, random_, depth + 1) for _ in range(random_.randrange(3))}
        case inspect.StructType(cls, fields):
            return cls(**{field.name: sample(field.type, random_, depth + 1) for field in fields})
        case _:
            raise NotImplementedError(kind)


def message_types() -> list[type[Any]]:
    """Return the types of all messages."""
    unions = (AgentMessage, ToAgent, WorkerMessage, ToWorker, ClientMessage, ToClient)
    return list(dict.fromkeys(each for union in unions for each in (get_args(union) or (union,))))


def valid_messages(random_: random.Random, of_each: int = 3) -> list[bytes]:
    """Return some encoded messages of each type."""
    kinds = [inspect.type_info(each) for each in message_types()]
    return [encode(sample(kind, random_)) for kind in kinds for _ in range(of_each)]


def mutated(data: bytes, others: Sequence[bytes], random_: random.Random) -> bytes:
    """Return the bytes after some accidents."""
    out = bytearray(data)
    for _ in range(random_.choice((1, 1, 1, 2, 5))):
        place = random_.randrange(len(out) + 1)
        match random_.randrange(8):
            case 0 if out:
                out[min(place, len(out) - 1)] ^= 1 << random_.randrange(8)
            case 1 if out:
                out[min(place, len(out) - 1)] = random_.choice(_BYTES)
            case 2:
                del out[place:]
            case 3:
                del out[place : place + random_.randrange(1, 9)]
            case 4:
                out[place:place] = random_.randbytes(random_.randrange(1, 9))
            case 5:
                out[place:] = random_.choice(others)[random_.randrange(8) :]
            case 6:
                out[place:place] = random_.choice(_BOMBS)
            case _:
                out[place : place + 8] = random_.randbytes(8)
    return bytes(out)


# The bytes at which MessagePack changes its mind: lengths of 8, 16 and 32 bits, nested arrays and maps, extensions.
_BYTES = (
    0x00,
    0x7F,
    0x80,
    0x8F,
    0x90,
    0x9F,
    0xA0,
    0xC0,
    0xC1,
    0xC4,
    0xC6,
    0xC9,
    0xD9,
    0xDB,
    0xDC,
    0xDD,
    0xDE,
    0xDF,
    0xFF,
)
_BOMBS = (
    b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1 items
    b"\xdf\xff\xff\xff\xff",  # a map of as many
    b"\xc6\xff\xff\xff\xff",  # as many bytes
    b"\xdb\x7f\xff\xff\xff",
    b"\x91" * 3000,  # arrays in arrays
    b"\x81\xa0" * 3000,
    b"\xff" * 64,
)


def pieces(data: bytes, random_: random.Random) -> list[bytes]:
    """Return the bytes in pieces of any size, as a stream brings them."""
    cuts = sorted(random_.randrange(len(data) + 1) for _ in range(random_.randrange(4)))
    return [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def encoded(value: object) -> bytes:
    """Return a value in MessagePack."""
    return msgspec.msgpack.encode(value)
