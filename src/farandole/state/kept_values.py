"""An ObjectState as a checkpoint sees it: plain values, and the number of their commits. commit_loop.py uses it."""

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
    """Return whether the state consists of its values only: its class overrides none of save, restore and sync."""
    kind = type(state)
    return all(getattr(kind, name) is getattr(ObjectState, name) for name in ("save", "restore", "sync"))


class KeptValues:
    """The newest commit of an ObjectState, without tensors. This class counts commits, since ObjectState does not."""

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
        """Set the same commit count on all ranks, newcomers included; their values are equal already. A collective."""
        said = transport.all_gather(_COUNT.pack(self._commits))
        self._commits = max(_COUNT.unpack(each)[0] for each in said)
        self.is_holder = True

    def capture(self) -> None:
        """Do nothing: a commit is a copy already."""

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
        """Do nothing: the state has no tensors."""
