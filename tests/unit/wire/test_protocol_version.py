"""The version of the protocol is a promise: what belongs to a version does not change any more."""

from __future__ import annotations

import inspect
from pathlib import Path

import msgspec

from farandole.base import membership
from farandole.base.wire import control, function_call, link_messages, messages
from farandole.base.wire.message import PROTOCOL_VERSION, Message


def description() -> str:
    """All types of messages with their fields, one a line."""
    types = {Message} | {
        each
        for module in (function_call, link_messages, messages, control, membership)
        for each in vars(module).values()
        if inspect.isclass(each) and issubclass(each, msgspec.Struct)
    }
    return "".join(
        f"{each.__name__}({', '.join(f'{name}: {annotations[name]}' for name in each.__struct_fields__)})\n"
        for each in sorted(types, key=lambda each: each.__name__)
        for annotations in [{name: text for base in reversed(each.__mro__) for name, text in _own(base).items()}]
    )


def _own(base: type) -> dict[str, str]:
    return dict(vars(base).get("__annotations__", {}))


def test_the_messages_are_those_of_this_version_of_the_protocol() -> None:
    """A peer of the same version refuses messages, or fields, that it does not know. If they have changed since the
    last release, raise the numbers in wire/message.py as it says there; then write the new description into the file.
    """
    known = Path(__file__).with_name(f"protocol-{PROTOCOL_VERSION}.txt")
    assert description() == known.read_text()
