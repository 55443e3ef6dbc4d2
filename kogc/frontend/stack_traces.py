"""The user's source lines in exported graphs."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.fx.proxy import TracerBase

TORCH_FOLDER = os.path.dirname(torch.__file__)
_ONNX = os.path.join(os.path.dirname(__file__), "onnx_")


@contextmanager
def user_stack_traces() -> Iterator[None]:
    """For the time of a ``with``: nodes remember every frame of the user's code.

    ``torch.export`` remembers frames of functions called ``forward`` alone, which hides the line inside a helper method
    or function. A PyTorch without this hook is left as it is; source lines are then less exact.
    """
    original = getattr(TracerBase, "_filter_traceback_frames", None)
    if original is None:
        yield
        return
    TracerBase._filter_traceback_frames = lambda tracer, summary: _user_frames(summary)
    try:
        yield
    finally:
        TracerBase._filter_traceback_frames = original


def _user_frames(summary: traceback.StackSummary) -> traceback.StackSummary:
    """Frames outside of PyTorch, and of what stands between an ONNX node and PyTorch, from the outermost ``forward`` on."""
    start = next((i for i, frame in enumerate(summary) if frame.name == "forward"), len(summary))
    frames = [frame for frame in summary[start:] if not frame.filename.startswith((TORCH_FOLDER, _ONNX))]
    return traceback.StackSummary.from_list(frames)
