"""Norms spelled out: x · rsqrt(mean(x²) + eps), with mean and bias for layer norms, in the orders that models use."""

from __future__ import annotations

import math

from kogc.ir.graph import Node
from kogc.ir.passes.recognize.lifted import Builder
from kogc.ir.passes.recognize.match import Bind, Found, Rewrite, p

_GROUP = Bind("group")
_EPS = Bind("eps")


def _fn(name: str, x) -> object:
    return p("lift.fn", x, fn=name)


def _inverse_rms(x: str) -> object:
    return _fn("rsqrt", p("lift.add_scalar", p("lift.mean", p("mul", x, x), group=_GROUP), number=_EPS))


def _rsqrt(builder: Builder, node: Node, found: Found) -> str:
    return builder.like("lift.fn", (found["x"],), node, fn="rsqrt")


def _mean(builder: Builder, node: Node, found: Found) -> str | None:
    count = found["group"] or builder[found["x"]].type.shape[-1]
    if not math.isclose(found["factor"] * count, 1):
        return None
    return builder.like("lift.mean", (found["x"],), node, group=found["group"])


def _scale_last(builder: Builder, node: Node, found: Found) -> str:
    """x · (r · w) → (x · r) · w."""
    inverse = builder.like("lift.fn", (found["y"],), node, fn="rsqrt")
    product = builder.like("mul", (found["x"], inverse), node)
    return builder.like("lift.vec_mul", (product, found["w"]), node, offset=found["offset"], group=found["wgroup"])


def _rms(builder: Builder, node: Node, found: Found) -> str:
    return builder.like("rms_norm", (found["x"],), node, eps=found["eps"], group=found["group"])


def _rms_of_scaled(builder: Builder, node: Node, found: Found) -> str:
    """(x · w) · rsqrt(mean(x²) + eps)."""
    return builder.like("lift.vec_mul", (_rms(builder, node, found), found["w"]), node, offset=found["offset"], group=found["wgroup"])


def _rms_scale(builder: Builder, node: Node, found: Found) -> str | None:
    features = builder[found["x"]].type.shape[-1]
    if (found["wgroup"] or features) not in (features, found["group"]):
        return None
    attrs = {"eps": found["eps"], "group": found["group"], "scale_offset": found["offset"]}
    return builder.like("rms_norm", (found["x"], found["w"]), node, **attrs)


def _layer(builder: Builder, node: Node, found: Found) -> str:
    return builder.like("layer_norm", (found["x"],), node, eps=found["eps"], group=found["group"])


def _layer_scale(builder: Builder, node: Node, found: Found) -> str | None:
    if found["offset"] or found["wgroup"] not in (None, found["group"]):
        return None
    inputs = tuple(found[name] for name in ("x", "w", "b") if name in found)
    return builder.like("layer_norm", inputs, node, eps=found["eps"], group=found["group"])


_CENTRED = p("lift.sub", "x", p("lift.mean", "x", group=_GROUP))
_VARIANCE = p("lift.var", "x", group=_GROUP)
_VECTOR = {"offset": Bind("offset"), "group": Bind("wgroup")}
_NORM = {"eps": _EPS, "group": _GROUP}

NORMS = (
    Rewrite("1 / sqrt", _fn("reciprocal", _fn("sqrt", "x")), _rsqrt),
    Rewrite("sqrt of 1 /", _fn("sqrt", _fn("reciprocal", "x")), _rsqrt),
    Rewrite("sum / count", p("scale", p("lift.sum", "x", group=_GROUP), factor=Bind("factor")), _mean),
    Rewrite("scale last", p("mul", "x", p("lift.vec_mul", _fn("rsqrt", "y"), "w", **_VECTOR)), _scale_last),
    Rewrite("x / rms(x)", p("mul", "x", _inverse_rms("x")), _rms),
    Rewrite("x · w / rms(x)", p("mul", p("lift.vec_mul", "x", "w", **_VECTOR), _inverse_rms("x")), _rms_of_scaled),
    Rewrite("rms norm with scale", p("lift.vec_mul", p("rms_norm", "x", **_NORM), "w", **_VECTOR), _rms_scale),
    Rewrite("layer norm as rms norm", p("rms_norm", _CENTRED, **_NORM), _layer),
    Rewrite("layer norm by variance", p("mul", _CENTRED, _fn("rsqrt", p("lift.add_scalar", _VARIANCE, number=_EPS))), _layer),
    Rewrite("layer norm with scale", p("lift.vec_mul", p("layer_norm", "x", **_NORM), "w", **_VECTOR), _layer_scale),
    Rewrite("layer norm with bias", p("lift.vec_add", p("layer_norm", "x", "w", **_NORM), "b", **_VECTOR), _layer_scale),
)
