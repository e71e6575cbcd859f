"""An ObjectState as a checkpoint sees it: plain values, and how many commits they have seen. commit_loop.py uses it."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from farandole.collectives.transport import Transport
from farandole.membership import Progress
from farandole.state.deep_copy import deep_copy
from farandole.state.object_state import ObjectState
from farandole.state.packing import Packed
from farandole.state.parts import pack_metadata

_COUNT = struct.Struct("<q")


def can_be_kept(state: ObjectState) -> bool:
    """Whether the values are all there is: nobody has a save, restore or sync of his own."""
    kind = type(state)
    return all(getattr(kind, name) is getattr(ObjectState, name) for name in ("save", "restore", "sync"))


class KeptValues:
    """The newest commit of an ObjectState; nothing large. ObjectState itself counts no commits: this does."""

    def __init__(self, state: ObjectState) -> None:
        self.state = state
        self.is_holder = False
        self._commits = 0

    @property
    def progress(self) -> Progress:
        return Progress(step=self._commits)

    def committed(self) -> None:
        self._commits += 1

    def agree(self, transport: Transport) -> None:
        """All ranks have the same values: let them have the same count, whoever joined. A collective."""
        said = transport.all_gather(_COUNT.pack(self._commits))
        self._commits = max(_COUNT.unpack(each)[0] for each in said)
        self.is_holder = True

    def capture(self) -> None:
        """A commit is a copy already."""

    def captured(self) -> Packed:
        return pack_metadata(
            {"commits": self._commits, "buffers": {}, "groups": {}, "stateful": {}, "values": self.state._saved_state}
        )

    def load_metadata(self, metadata: Mapping[str, Any]) -> None:
        self._commits = metadata["commits"]
        self.state._saved_state = deep_copy(dict(metadata["values"]), "state")
        self.state.restore()

    def live_tensors(self) -> dict[str, Any]:
        return {"parameters": {}, "optimizer": {}}

    def load_tensors(self, tensors: Mapping[str, Any]) -> None:
        """There is none."""
