"""Records of an ElasticSampler in the form for the sample ledger: by epoch, as samples. Pure; sampler.py uses it."""

from __future__ import annotations

import numpy as np

from farandole.data.remainder import Order, Positions
from farandole.state.recording import Part


def parts_by_epoch(
    order: Order, size: int, epoch: int, ids: Positions, everyone: Positions | None, repeats: Positions
) -> list[Part]:
    """Return a Part for each epoch of these positions: those below 0 belong to earlier epochs, and were carried.

    size  samples of an epoch;  ids, everyone, repeats  positions, as in Part
    """
    told = [positions for positions in (ids, everyone, repeats) if positions is not None]
    back = np.unique(np.concatenate(told) // size)

    def of(positions: Positions, epochs: int) -> Positions:
        return order(positions[positions // size == epochs])

    return [
        Part(epoch + epochs, of(ids, epochs), of(repeats, epochs), None if everyone is None else of(everyone, epochs))
        for epochs in back.tolist()
    ]
