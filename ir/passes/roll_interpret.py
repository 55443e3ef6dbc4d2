"""Running a rolled program with numpy in fp64: its loops, tables and buffer slots, as every target must run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kogc.ir.ops import op_row
from kogc.ir.program import Operand, OpSpec, Output, Part, Program, Stage
from kogc.ir.weights import WeightSource

#: Ops whose results have no lane axis.
_WITHOUT_LANES = ("lane_sum", "lane_mean", "lane_concat", "embed")


class ProgramError(RuntimeError):
    """A program reads a buffer slot that does not hold the write it wants."""


@dataclass(frozen=True)
class StepResult:
    """Logits [T, vocab] and the next token after each position [T]."""

    logits: np.ndarray
    token: np.ndarray


class ProgramRun:
    """One sequence: caches and buffers live across steps.

    Args:
        program: what ``roll`` made.
        weights: source of all matrices, embedding tables and constants.
        tables: position tables by key (a graph's ``tables``).

    Every value is held as [T, lanes, width]. ``slots[buffer][slot]`` is (write index, value); a read compares the index.
    """

    def __init__(self, program: Program, weights: WeightSource, tables: Mapping[str, np.ndarray]) -> None:
        self.program = program
        self.tables = tables
        self.weights = weights
        self.caches = {c.key: np.zeros((c.kv_heads, c.capacity, c.head_dim)) for c in program.caches}
        self.slots: dict[str, list[tuple[int, np.ndarray] | None]] = {b.name: [None] * b.slots for b in program.buffers}
        self.steps = 0
        #: Outputs of every stage instance of the last step: (segment, iteration, stage, value name, buffer) → [T, lanes, width].
        #: Values of different parts may have one name.
        self.published: dict[tuple[int, int, int, str, str], np.ndarray] = {}
        self._buffers = {b.name: b for b in program.buffers}
        self._known: dict[str, np.ndarray] = {}

    def step(self, token: Sequence[int], position: Sequence[int]) -> StepResult:
        """Run one step of T tokens at their positions.

        Raises:
            ProgramError: a slot does not hold the write that a stage reads.
        """
        self._token, self._position = np.asarray(token, np.int64), np.asarray(position, np.int64)
        self.published = {}
        for segment, iteration, number, stage in self.program.instances():
            self._where = (segment, iteration, number)
            _StageRun(self, stage, iteration).run()
        self.steps += 1
        return StepResult(self._logits, self._logits.argmax(-1))

    # ── state ──

    def read(self, operand: Operand, iteration: int, stage: Stage) -> np.ndarray:
        index, slot = self._index(operand.buffer, operand.write.at(iteration))
        held = self.slots[operand.buffer][slot]
        if held is None or held[0] != index:
            found = "nothing" if held is None else f"write {held[0]}"
            raise ProgramError(
                f"stage {stage.name} (iteration {iteration}) reads write {index} of {operand.buffer}, slot {slot} holds {found}"
            )
        return held[1][:, :1] if operand.access == "rank" else held[1]  # all ranks hold the same

    def write(self, output: Output, iteration: int, value: np.ndarray) -> None:
        index, slot = self._index(output.buffer, output.write.at(iteration))
        form = self._buffers[output.buffer]
        if form.payload == "vector" and value.shape[1] == 1:
            value = np.repeat(value, form.lanes, 1)
        self.slots[output.buffer][slot] = (index, value)
        self.published[(*self._where, output.value, output.buffer)] = value
        if output.kind == "logits":
            self._logits = value.reshape(len(value), -1)

    def append(self, output: Output, iteration: int, value: np.ndarray) -> None:
        """Write the step's positions of a cache; heads of all lanes lie side by side."""
        cache = self.caches[output.caches[iteration]]
        kv_heads, _, head_dim = cache.shape
        cache[:, self._position] = value.reshape(len(value), kv_heads, head_dim).transpose(1, 0, 2)

    def weight(self, key: str) -> np.ndarray:
        if key not in self._known:
            self._known[key] = np.asarray(self.weights.get(key)).astype(np.float64)
        return self._known[key]

    def input(self, name: str) -> np.ndarray:
        return {"token": self._token, "position": self._position}[name]

    def _index(self, buffer: str, write: int) -> tuple[int, int]:
        form = self._buffers[buffer]
        if not 0 <= write < form.writes_per_step:
            raise ProgramError(f"write {write} of {buffer} does not exist, a step makes {form.writes_per_step}")
        index = self.steps * form.writes_per_step + write
        return index, index % form.slots


class _StageRun:
    """One stage instance over all lanes and rows."""

    def __init__(self, run: ProgramRun, stage: Stage, iteration: int) -> None:
        self.run_ = run
        self.stage = stage
        self.iteration = iteration
        self.seen: dict[str, np.ndarray] = {name: run.input(name) for name in ("token", "position")}
        for operand in stage.operands:
            self.seen[operand.name] = run.read(operand, iteration, stage)
        for const in stage.consts:
            key = const.key(iteration)
            lead = (const.lanes,) if const.lanes > 1 else ()
            values = run.weight(key) if const.kind == "weight" else run.tables[key]
            self.seen[const.name] = np.asarray(values).reshape(*lead, *const.shape)

    def run(self) -> None:
        self._ops(self.stage.prologue, self.seen)
        self._publish(self.stage.prologue_outputs, self.seen)
        for part in self.stage.parts:
            self._part(part)
        if self.stage.attention:
            self._attention()

    def _part(self, part: Part) -> None:
        seen = dict(self.seen)
        if self.stage.kind in ("embed", "combine"):
            seen["row"] = self._row()
        for number, matrix in enumerate(part.matrices):
            rows = self.run_.weight(matrix.key(self.iteration)).reshape(matrix.lanes, -1, matrix.k)
            rows = rows[:, matrix.rows_from : matrix.rows_from + matrix.rows]
            seen[f"dot{number}"] = np.einsum("tlk,lnk->tln", seen[self.stage.vector], rows, optimize=True)
        self._ops(part.epilogue, seen)
        self._publish(part.outputs, seen)

    def _row(self) -> np.ndarray:
        """What the ops of a part without matrices start from."""
        core = self.stage.combine
        if core is None:
            return self.run_.weight(self.stage.embed_table)[self.seen["token"]][:, None]
        attrs = {"head_dim": core.head_dim, "splits": core.splits}
        return op_row("attention_combine").evaluate((self.seen[core.partials],), attrs)

    def _attention(self) -> None:
        core, lanes = self.stage.attention, self.stage.lanes
        keys, values = (self.run_.caches[key] for key in core.caches[self.iteration])
        attrs = {
            "heads": core.heads * lanes, "kv_heads": core.kv_heads * lanes, "head_dim": core.head_dim, "scale": core.scale,
            "softcap": core.softcap or None, "window": core.windows[self.iteration] or None, "splits": core.splits,
        }  # fmt: skip
        partial = op_row("attention_partial").evaluate((self.seen[core.q], keys, values, self.seen["position"]), attrs)
        self._publish((core.output,), {core.output.value: partial})

    def _ops(self, specs: Sequence[OpSpec], seen: dict[str, np.ndarray]) -> None:
        for spec in specs:
            operands = tuple(seen[name] for name in spec.inputs)
            if spec.op == "lane_broadcast":
                value = np.repeat(operands[0], spec.lanes, 1)
            else:
                value = op_row(spec.op).evaluate(operands, spec.attrs)
            value = value[:, None] if spec.op in _WITHOUT_LANES else value
            expected = (len(self.seen["token"]), spec.lanes, spec.width)
            if value.shape != expected:
                raise ProgramError(f"{spec.name} ({spec.op}) in stage {self.stage.name} has shape {value.shape}, expected {expected}")
            seen[spec.name] = value

    def _publish(self, outputs: Sequence[Output], seen: Mapping[str, np.ndarray]) -> None:
        for output in outputs:
            if output.kind == "cache":
                self.run_.append(output, self.iteration, seen[output.value])
            self.run_.write(output, self.iteration, seen[output.value])


def interpret_program(
    program: Program, weights: WeightSource, tables: Mapping[str, np.ndarray], tokens: Sequence[int], step_tokens: int = 1
) -> np.ndarray:
    """Logits [n, vocab] of n token ids fed from position 0, ``step_tokens`` a step (the last step may be shorter)."""
    run = ProgramRun(program, weights, tables)
    logits = []
    for start in range(0, len(tokens), step_tokens):
        part = tokens[start : start + step_tokens]
        logits.append(run.step(part, range(start, start + len(part))).logits)
    return np.concatenate(logits)
