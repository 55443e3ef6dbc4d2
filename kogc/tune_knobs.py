"""Knobs: constants in a kernel's source that change its timing and nothing else. A target's ``[tune]`` lists what to try."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from kogc.artifact import Artifact
from kogc.errors import BadInput
from kogc.targets import target_facts, target_names

#: Knob → value.
Values = Mapping[str, int]


def knobs_of(artifact: Artifact) -> dict[str, tuple[int, ...]]:
    """Knob → the values worth a try, in the order in which to try them. Raises BadInput for a target without knobs."""
    target = artifact.manifest.target
    if target not in target_names():
        raise BadInput(f"{artifact.path} is for target {target}; this kogc has {', '.join(target_names())}")
    knobs = target_facts(target).get("tune", {})
    if not knobs:
        raise BadInput(f"{artifact.path} is for target {target}, which has no knobs to tune ([tune] in its target.toml)")
    return {name: tuple(values) for name, values in knobs.items()}


def values_in(artifact: Artifact, names: Iterable[str]) -> dict[str, int]:
    """The knobs' values in the artifact's source. Raises BadInput naming one that is not there."""
    source, found = artifact.source, {}
    for name in names:
        constants = _constant(name).findall(source)
        if len(constants) != 1:
            raise BadInput(f"the source in {artifact.path} does not set {name}: another version of kogc emitted it; compile the model again")
        found[name] = int(constants[0][1])
    return found


def with_values(source: str, values: Values) -> str:
    """``source`` with those constants, each of which it sets once."""
    for name, value in values.items():
        source = _constant(name).sub(rf"\g<1>{value}\g<3>", source)
    return source


def _constant(name: str) -> re.Pattern[str]:
    """``constexpr int NAME = VALUE;`` in three groups, of which the second is the value."""
    return re.compile(rf"^(constexpr int {re.escape(name)} = )(-?\d+)(;)", re.MULTILINE)
