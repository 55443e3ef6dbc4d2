"""What one token costs in memory traffic, counted from the program: the number that bounds the speed of batch-1 decoding."""

from __future__ import annotations

from dataclasses import dataclass

from kogc.ir.program import Program, Stage

ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class Traffic:
    """Bytes read for one token: ``weights`` (embedding row included) and ``kv`` at a given context position."""

    weights: int
    kv: int

    @property
    def total(self) -> int:
        return self.weights + self.kv

    def tokens_per_second(self, gigabytes_per_second: float) -> float:
        """The speed at which these bytes alone would keep a memory of that speed busy."""
        return gigabytes_per_second * 1e9 / self.total


def traffic(program: Program, position: int) -> Traffic:
    """Bytes one token at context ``position`` makes the machine read. Padding of the packed tiles is not counted."""
    size = ELEMENT_BYTES[program.dtype]
    weights = kv = 0
    for _, iteration, _, stage in program.instances():
        weights += _matrix_elements(stage) * size
        if stage.kind == "embed":
            weights += stage.embed_width * size
        if stage.attention:
            kv += _cached_elements(stage, iteration, position) * size
    return Traffic(weights, kv)


def _matrix_elements(stage: Stage) -> int:
    # A matrix that lanes share is streamed once for each of them.
    return sum(stage.lanes * matrix.rows * matrix.k for part in stage.parts for matrix in part.matrices)


def _cached_elements(stage: Stage, iteration: int, position: int) -> int:
    attention = stage.attention
    window = attention.windows[iteration if len(attention.windows) > 1 else 0]
    visible = min(position + 1, window) if window else position + 1
    return 2 * stage.lanes * attention.kv_heads * attention.head_dim * visible
