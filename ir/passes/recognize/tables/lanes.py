"""Lanes: where they begin, and sums over the other lanes."""

from __future__ import annotations

import math

from kogc.ir.graph import Node
from kogc.ir.passes.recognize.lifted import POINTWISE, Builder
from kogc.ir.passes.recognize.match import Bind, Found, Rewrite, p

#: Besides pointwise ops, these do the same on every lane.
_PER_LANE = POINTWISE | {"lift.mean", "lift.sum", "lift.var", "rms_norm", "layer_norm"}


def _spread(builder: Builder, node: Node, found: Found) -> str | None:
    """f(x) on every lane → f(x on every lane), so that lanes begin early and a model's layers look alike.

    Where f joins several vectors this is done only if one of them is on the lanes anyway.
    """
    source = builder[found["x"]]
    operands = [name for name in dict.fromkeys(source.inputs) if builder[name].op not in ("weight", "table")]
    if source.op not in _PER_LANE or (len(operands) > 1 and not any(_on_lanes(builder, name) for name in operands)):
        return None
    inputs = tuple(builder.lanes(name, found["lanes"]) if name in operands else name for name in source.inputs)
    return builder.emit(source.op, inputs, source.attrs, node.type, source)


def _on_lanes(builder: Builder, name: str) -> bool:
    return any(user.op == "lane_broadcast" for user in builder.graph.users(name))


SPREAD = (Rewrite("begin lanes early", p("lane_broadcast", "x", lanes=Bind("lanes")), _spread),)

_SUM = p("lane_broadcast", p("lane_sum", "o"))


def _others(builder: Builder, node: Node, found: Found) -> str:
    return builder.like("lane_others", (found["o"],), node)


def _plus_others(builder: Builder, node: Node, found: Found) -> str:
    return builder.like("add", (found["x"], _others(builder, node, found)), node)


def _mean(builder: Builder, node: Node, found: Found) -> str | None:
    lanes = builder[found["x"]].type.shape[1]
    return builder.emit("lane_mean", (found["x"],), {}, node.type, node) if math.isclose(found["factor"] * lanes, 1) else None


LANES = (
    Rewrite("sum of the other lanes", p("lift.sub", _SUM, "o"), _others),
    Rewrite("sum of the other lanes", p("add", _SUM, p("scale", "o", factor=-1.0)), _others),
    Rewrite("plus the sum, minus the own", p("lift.sub", p("add", "x", _SUM), "o"), _plus_others),
    Rewrite("minus the own, plus the sum", p("add", p("lift.sub", "x", "o"), _SUM), _plus_others),
    Rewrite("mean over lanes", p("scale", p("lane_sum", "x"), factor=Bind("factor")), _mean),
)
