"""Functions of one value: softcaps by pattern, activations by their values."""

from __future__ import annotations

import math

import numpy as np

from kogc.ir.graph import Node
from kogc.ir.ops import op_row
from kogc.ir.ops.activations import ACTIVATIONS
from kogc.ir.passes.recognize.lifted import Builder
from kogc.ir.passes.recognize.match import Bind, Found, Rewrite, p

#: Where functions are compared. Models round the constants of gelu to some eight digits, hence the tolerance.
GRID = np.linspace(-6.0, 6.0, 97)
TOLERANCE = 1e-6
_KNOWN = {name: function(GRID) for name, function in ACTIVATIONS.items()}
_HELPERS = {
    "lift.sub": lambda o, a: o[0] - o[1],
    "lift.add_scalar": lambda o, a: o[0] + a["number"],
    "lift.pow": lambda o, a: np.power(o[0], a["exponent"]),
    "lift.fn": lambda o, a: _FN[a["fn"]](o[0]),
}
_FN = {
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
    "reciprocal": lambda x: 1 / x,
    "exp": np.exp,
    "abs": np.abs,
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
}
_ELEMENTWISE = ("add", "mul", "scale", "activation", *_HELPERS)


def _curve(builder: Builder, name: str, depth: int = 24) -> tuple[str, np.ndarray]:
    """The one node that ``name`` is an elementwise function of, and the function's values on the grid."""
    node = builder[name]
    if node.op not in _ELEMENTWISE or depth == 0:
        return name, GRID
    curves = [_curve(builder, operand, depth - 1) for operand in node.inputs]
    if len({source for source, _ in curves}) != 1:
        return name, GRID
    evaluate = _HELPERS.get(node.op) or op_row(node.op).evaluate
    with np.errstate(all="ignore"):
        return curves[0][0], evaluate(tuple(values for _, values in curves), node.attrs)


def _activation(builder: Builder, node: Node, found: Found) -> str | None:
    source, values = _curve(builder, node.name)
    if source == node.name:
        return None
    for fn, known in _KNOWN.items():
        if np.allclose(values, known, rtol=0, atol=TOLERANCE):
            return builder.like("activation", (source,), node, fn=fn)
    return None


def _softcap(builder: Builder, node: Node, found: Found) -> str | None:
    if not math.isclose(found["inner"] * found["cap"], 1, rel_tol=1e-6) or found["cap"] <= 0:
        return None
    return builder.like("softcap", (found["x"],), node, cap=found["cap"])


#: Ops that an activation spelled out may end in.
_ENDS = {"mul": ("a", "b"), "add": ("a", "b"), "scale": ("a",), "lift.fn": ("a",), "lift.add_scalar": ("a",)}

FUNCTIONS = (
    Rewrite(
        "cap · tanh(x / cap)",
        p("scale", p("activation", p("scale", "x", factor=Bind("inner")), fn="tanh"), factor=Bind("cap")),
        _softcap,
    ),
    *(Rewrite(f"activation ending in {op}", p(op, *operands), _activation) for op, operands in _ENDS.items()),
)
