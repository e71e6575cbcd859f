"""The frames of the script, from its first function to the loop over its batches. Their variables can be written, by
way of CPython's own structures."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

_PACKAGES = tuple(f"{Path(module.__file__ or '').parent}/" for module in (torch, sys.modules["farandole"]))


def frames_of_script() -> list[FrameType]:
    """Return the frames that belong to none of torch, Farandole and the start of Python, the outermost one first."""
    frames = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if not frame.f_code.co_filename.startswith((*_PACKAGES, "<frozen")):
            frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def runs_in_autograd_function() -> bool:
    """Return whether the code that has called runs in the forward() of a torch.autograd.Function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        first = frame.f_code.co_varnames[:1]
        if frame.f_code.co_name == "forward" and first and isinstance(frame.f_locals.get(first[0]), FunctionCtx):
            return True
        frame = frame.f_back
    return False


def set_locals(frame: FrameType, values: Mapping[str, Any]) -> None:
    """Write variables of a function that is running. They have to exist."""
    frame.f_locals.update(values)
    if sys.version_info < (3, 13):  # later versions write through (PEP 667)
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
