"""Shards: a stored tensor cut into one part per lane, as weight leaves with attr ``cut`` show it."""

from __future__ import annotations

import numpy as np

from kogc.ir.graph import Node
from kogc.ir.types import TensorType

#: ``cut`` of a weight leaf. ``rows``: lane l has the l-th part of the rows; with attr ``copies`` so many neighbouring lanes have the
#: same part. ``columns``: lane l has the l-th part of the columns. ``once``: lane 0 has all of a vector, the others zeros.
CUTS = ("rows", "columns", "once")

#: Between the key of a stored tensor and what has become of it, in the key of a shard.
CUT_MARK = " cut by "


def shard_leaf(leaf: Node, name: str, cut: str, lanes: int, part: tuple[int, int], copies: int = 1) -> Node:
    """The weight ``leaf`` [rows, columns] or [rows], of which the rows ``part`` are cut over ``lanes`` lanes."""
    rows, rest = part[1] - part[0], leaf.type.shape[1:]
    shape = {
        "rows": (lanes, rows * copies // lanes, *rest),
        "columns": (lanes, rows, *(columns // lanes for columns in rest)),
        "once": (lanes, rows),
    }[cut]
    attrs = {**leaf.attrs, "whole": tuple(leaf.type.shape), "cut": cut, "part": part, "copies": copies}
    return leaf.with_(name=name, type=TensorType(shape, leaf.type.dtype), attrs=attrs)


def uncut(shard: Node) -> Node:
    """The leaf that ``shard_leaf`` was given."""
    attrs = {name: value for name, value in shard.attrs.items() if name not in ("whole", "cut", "part", "copies")}
    return shard.with_(type=TensorType(tuple(shard.attrs["whole"]), shard.type.dtype), attrs=attrs)


def shard_values(shard: Node, whole: np.ndarray) -> np.ndarray:
    """What ``shard`` shows of the values ``whole`` of its uncut leaf, [lanes, …] in their dtype."""
    first, last = shard.attrs["part"]
    values, (lanes, *rest) = whole[first:last], shard.type.shape
    if shard.attrs["cut"] == "columns":
        return values.reshape(len(values), lanes, -1).swapaxes(0, 1)
    if shard.attrs["cut"] == "once":
        return np.concatenate([values[None], np.zeros((lanes - 1, *values.shape), values.dtype)])
    parts = values.reshape(lanes // shard.attrs["copies"], -1, *values.shape[1:])
    return np.repeat(parts, shard.attrs["copies"], 0).reshape(lanes, *rest)
