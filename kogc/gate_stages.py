"""The gate for single stages: what a probe build published, against the program run by the interpreter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kogc.artifact import Artifact
from kogc.codegen.layout import Layout, ProbeEntry, make_layout, numbered_stages, stage_places
from kogc.gate_numbers import Closeness, closeness
from kogc.ir.ops import op_row
from kogc.ir.passes.roll_interpret import ProgramRun
from kogc.ir.program import Program, Stage
from kogc.packed import packed_weights


@dataclass(frozen=True)
class StageCheck:
    """How close the outputs of one stage are, in the iteration where they are worst."""

    stage: str
    segment: str
    iteration: int
    rel_rmse: float
    cosine: float
    passed: bool


class _LeanRun(ProgramRun):
    """Keeps no weights: all tokens go through in one step, so every weight is wanted once."""

    def weight(self, key: str) -> np.ndarray:
        return np.asarray(self.weights.get(key)).astype(np.float64)


def check_stages(artifact: Artifact, ids: Sequence[int], limit: float) -> list[StageCheck]:
    """Run ``ids`` through a probe build and through the interpreter; compare every stage's outputs at the last step's tokens.

    Returns one check per stage, in execution order. Raises ToolchainError where no C++ compiler works.
    """
    program, manifest = artifact.program, artifact.manifest
    layout = make_layout(program, manifest.ranks * manifest.workers, manifest.tile_rows)
    with artifact.engine(probe=True) as engine:
        probed = engine.probe(list(ids))
    run = _LeanRun(program, packed_weights(artifact), artifact.tables)
    run.step(ids, range(len(ids)))
    tokens = len(ids) % layout.columns or layout.columns
    found = dict(_compare(program, layout, probed, run.published, tokens))
    return [_worst(program, number, found, limit) for number, _, _ in numbered_stages(program) if number in found]


def _compare(
    program: Program, layout: Layout, probed: np.ndarray, published: Mapping, tokens: int
) -> Iterator[tuple[int, list[tuple[int, Closeness]]]]:
    """(stage number, [(iteration, closeness)]) of all probed values."""
    places = stage_places(program)
    found: dict[int, list[tuple[int, Closeness]]] = {}
    for entry in layout.probes:
        segment, index = places[entry.stage]
        stage = program.segments[segment].stages[index]
        wanted = published[segment, entry.iteration, index, entry.value, entry.buffer][-tokens:]
        seen = _probed(entry, layout.columns, probed)[:tokens].reshape(wanted.shape)
        found.setdefault(entry.stage, []).append((entry.iteration, closeness(_meaning(stage, seen), _meaning(stage, wanted))))
    yield from found.items()


def _probed(entry: ProbeEntry, columns: int, probed: np.ndarray) -> np.ndarray:
    size = columns * entry.lanes * entry.width
    return probed[entry.offset : entry.offset + size].reshape(columns, entry.lanes, entry.width)


def _meaning(stage: Stage, values: np.ndarray) -> np.ndarray:
    """Partial attention results merged to the attention output: how the context is cut depends on the step's size."""
    if not stage.attention:
        return values
    attrs = {"head_dim": stage.attention.head_dim, "splits": stage.attention.splits}
    with np.errstate(invalid="ignore"):
        return op_row("attention_combine").evaluate((values.astype(np.float64),), attrs)


def _worst(program: Program, number: int, found: Mapping[int, list[tuple[int, Closeness]]], limit: float) -> StageCheck:
    segment, stage = next((program.segments[s], stage) for n, s, stage in numbered_stages(program) if n == number)
    # The first iteration that is off, where one is: later ones only inherit the error.
    off = [one for one in found[number] if not one[1].within(limit)]
    iteration, close = off[0] if off else max(found[number], key=lambda one: one[1].rel_rmse)
    return StageCheck(stage.name, segment.name, iteration, close.rel_rmse, close.cosine, not off)
