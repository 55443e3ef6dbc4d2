"""Facts about a program that reports and schedules want at hand."""

from __future__ import annotations

from typing import Any

from kogc.ir.graph import Graph
from kogc.ir.program import Program
from kogc.ir.types import NUMPY_DTYPES


def program_meta(graph: Graph, program: Program) -> dict[str, Any]:
    """``layers`` (attentions), ``hidden`` and ``lanes`` of the stream, ``stages`` per token, ``weight_bytes`` streamed per
    step (matrices; the one embedding row is not counted), ``kv_bytes_per_position`` of all caches."""
    size = NUMPY_DTYPES[program.dtype].itemsize
    stages = [stage for _, _, _, stage in program.instances()]
    matrices = [m for stage in stages for part in stage.parts for m in part.matrices]
    return {
        "layers": sum(stage.kind == "attention" for stage in stages),
        "hidden": next((stage.embed_width for stage in stages if stage.kind == "embed"), 0),
        "lanes": max(stage.lanes for stage in stages),
        "stages": len(stages),
        "weight_bytes": sum(m.lanes * m.rows * m.k for m in matrices) * size,
        "kv_bytes_per_position": sum(cache.kv_heads * cache.head_dim for cache in program.caches) * size,
    }
