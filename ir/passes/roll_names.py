"""Names of what a stage computes, as a reader of the generated kernel meets them."""

from __future__ import annotations

from kogc.ir.ops import op_row

_RESULTS = {
    "embed": "placed",
    "rms_norm": "normed",
    "layer_norm": "normed",
    "rope": "turned",
    "activation": "activated",
    "gated_activation": "gated",
    "add": "sum",
    "mul": "product",
    "scale": "scaled",
    "softcap": "capped",
    "lane_broadcast": "spread",
    "lane_sum": "lane_total",
    "lane_others": "others",
    "lane_mean": "mean",
    "lane_concat": "joined",
    "attention_combine": "attended",
}


def op_name(op: str) -> str:
    """What the result of ``op`` is called."""
    return _RESULTS.get(op, f"{op}_result")


def const_name(op: str, slot: int) -> str:
    """What the constant in operand ``slot`` of ``op`` is called: ``rms_norm_scale``, ``rope_cos``, ``linear_bias``."""
    return f"{op}_{op_row(op).operands[slot]}"
