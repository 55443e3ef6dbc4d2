"""The values of one stage under their C++ names, and the expressions by which its code reads them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kogc.codegen.layout import Layout, computed_once, pitch, stored_lanes
from kogc.codegen.names import Scope
from kogc.codegen.staging import Space, Staging
from kogc.ir.program import Affine, Buffer, Const, Operand, OpSpec, Output, Part, Stage


class RenderError(ValueError):
    """A program the templates have no code for. The message names the stage and the op."""


@dataclass(frozen=True)
class OperandView:
    """A buffer value the stage reads: ``name`` is the View, ``buffer`` the C++ constant, ``write`` the in-step number,
    ``space`` where a worker keeps what it receives, None where it reads it in the exchange itself."""

    name: str
    buffer: str
    write: str
    lanes: int
    width: int
    space: str | None
    shape: str


@dataclass(frozen=True)
class WriteView:
    """A write of the stage, published once when the worker made any part of it; ``sent`` where other ranks read it in some
    iteration."""

    name: str
    buffer: str
    write: str
    payload: str
    shape: str
    sent: bool


@dataclass(frozen=True)
class ConstView:
    """A constant; with ``space``, ``width`` floats of it are kept there: of a ``table`` the step's row, else those of the worker's
    lane, when it has ``lanes``."""

    name: str
    space: str | None
    width: int
    lanes: int
    table: bool

    def begin(self, stored: str) -> str:
        """Where the constant begins, as const float*, given where it is stored."""
        if self.space is None:
            return stored
        if self.table:
            return f"position_row<{self.width}>(w, {stored}, {self.space})"
        return f"constants<{self.width}>(w, {stored}, {'own_lane' if self.lanes > 1 else '0'}, {self.space})"


@dataclass(frozen=True)
class ScratchView:
    """A prologue result in the worker's scratch, [columns][lanes][pitch] from ``space``."""

    name: str
    space: str
    lanes: int
    pitch: int


class StageValues:
    """Operands, constants, prologue results and writes of ``stage`` (global number ``number``) with their names."""

    def __init__(
        self, stage: Stage, number: int, iterations: int, layout: Layout, tile_rows: int, buffers: Scope, staging: Staging | None = None
    ) -> None:
        self.stage, self.number, self.iterations = stage, number, iterations
        self.layout, self.tile_rows, self._buffers, self.staging = layout, tile_rows, buffers, staging
        self.scope = Scope()
        self._operands = {operand.name: operand for operand in stage.operands}
        self._consts = {const.name: const for const in stage.consts}
        self._ops = {op.name: op for op in stage.prologue}
        #: How the dots' vector is taken in; None where there are no dots, or all operands are read in the exchange itself.
        self.intake = staging.intakes[number] if staging is not None else None
        polled = self.intake.operand if self.intake else None
        self._views = {operand.name: self._operand(operand) for operand in stage.operands if operand is not polled}
        self.consts = tuple(self._const(const) for const in stage.consts)
        #: The ops computed by all threads together before the dots.
        self.prologue = tuple(op for op in stage.prologue if not polled or op is not self.intake.norm)
        self.scratch = tuple(self._scratch(op) for op in self.prologue)
        self._writes: dict[tuple[str, Affine], WriteView] = {}

    @property
    def operands(self) -> tuple[OperandView, ...]:
        """What is received before anything else; not a vector that every warp takes in by itself."""
        return tuple(self._views.values())

    # ── names ──

    def write_number(self, write: Affine) -> str:
        """``base + stride · iteration`` as C++."""
        if self.iterations == 1 or write.stride == 0:
            return str(write.base)
        turns = "iteration" if write.stride == 1 else f"{write.stride} * iteration"
        return f"{write.base} + {turns}" if write.base else turns

    def buffer_constant(self, name: str) -> str:
        return f"{self._buffers.name(name, f'buffer_{name}')}()"

    def write_of(self, output: Output) -> WriteView:
        """The write an output goes to; outputs with the same buffer and number share it."""
        key = (output.buffer, output.write)
        if key not in self._writes:
            buffer = self.buffer(output.buffer)
            name = self.scope.name(f"write {key}", f"new_{output.buffer}")
            self._writes[key] = WriteView(
                name, self.buffer_constant(output.buffer), self.write_number(output.write), buffer.payload, _shape(buffer),
                bool(output.sent_to),
            )
        return self._writes[key]

    @property
    def writes(self) -> tuple[WriteView, ...]:
        return tuple(self._writes.values())

    @property
    def own_lane(self) -> str:
        """The lane among those of the worker's rank, whose caches are all that the rank holds, as C++."""
        return "lane" if self.layout.ranks == 1 else f"(lane % {self.stage.lanes // self.layout.ranks})"

    def buffer(self, name: str) -> Buffer:
        return self.layout.buffer(name).buffer

    # ── whole vectors ──

    def is_lane_wise(self, name: str) -> bool:
        """Whether a value has several lanes at hand, so that a lane must be named to read it."""
        if name in self._operands:
            return self._operands[name].lanes > 1
        return stored_lanes(self._ops[name]) > 1

    def same_for_all_lanes(self, name: str) -> bool:
        """Whether a value, once there, serves all lanes that a worker visits."""
        if name in self._operands:
            return self._operands[name].lanes == 1 or self._operands[name].access == "rank"
        return computed_once(self._ops[name])

    def lane_in(self, name: str, lane: str) -> str:
        """Which lane of a value a worker reads in ``lane`` of the stage, both as C++."""
        if name in self._operands and self._operands[name].access == "rank":
            return "w.launch->rank"
        return lane if self.is_lane_wise(name) else "0"

    def vector(self, name: str, lane: str) -> str:
        """The vector of column t in ``lane`` (an expression) of an operand or prologue result, as float*."""
        if name not in self._operands and name not in self._ops:
            raise RenderError(f"stage {self.stage.name} reads {name}, which is neither operand nor prologue result")
        return f"{self._name_of(name)}.at(t, {self.lane_in(name, lane)})"

    def constant(self, name: str, lane: str) -> str | None:
        """A weight constant as const float*, or None when ``name`` is none."""
        const = self._consts.get(name)
        if const is None:
            return None
        cname = self.scope.name(f"const {name}")
        return cname if const.lanes == 1 else f"{cname} + {lane} * {prod(const.shape)}"

    def table(self, name: str, width: int) -> str | None:
        """The row of a position table at column t's position, ``width`` floats, as const float*; None when ``name`` is no constant."""
        pointer = self.constant(name, "lane")
        near = self.staging is not None and name in self.staging.consts[self.number]
        return pointer if pointer is None or near else f"{pointer} + (int64_t)w.position[t] * {width}"

    def const(self, name: str) -> Const | None:
        return self._consts.get(name)

    def width(self, name: str) -> int:
        return self._operands[name].width if name in self._operands else self._ops[name].width

    def lanes(self, name: str) -> int:
        return self._operands[name].lanes if name in self._operands else self._ops[name].lanes

    def operand_view(self, name: str) -> OperandView | None:
        return self._views.get(name)

    def columns(self, name: str) -> int:
        """Floats from column to column of a value."""
        if name in self._operands and self.staging is not None:
            space = self.staging.operands[self.number][name]
            return space.lanes * space.pitch
        if name in self._operands:
            placed = self.layout.buffer(self._operands[name].buffer)
            return placed.lanes * placed.pitch
        op = self._ops[name]
        return stored_lanes(op) * pitch(op.width, self.tile_rows)

    def packed(self) -> str:
        """Where the dots' vector, or attention's queries, are rearranged, as float*; null where they are not."""
        space = self.staging.packed[self.number]
        return "nullptr" if space is None else _begin(space)

    # ── rows of a part ──

    def rows(self, name: str, part: Part, rows: int) -> str:
        """Where the rows of ``part`` begin in an operand, prologue result or constant of its epilogue, as float*."""
        constant = self.constant(name, "lane")
        if constant:
            return constant
        at = self.vector(name, "lane")
        side_by_side = self.stage.lanes > 1 and not self.is_lane_wise(name) and self.width(name) == self.stage.lanes * rows
        return f"{at} + lane * {rows}" if side_by_side else at

    def _operand(self, operand: Operand) -> OperandView:
        buffer = self.buffer(operand.buffer)
        return OperandView(
            self.scope.name(f"value {operand.name}", operand.name), self.buffer_constant(operand.buffer),
            self.write_number(operand.write), operand.lanes, operand.width, self._space(operand), _shape(buffer),
        )  # fmt: skip

    def _space(self, operand: Operand) -> str | None:
        if self.staging is None:
            return None
        space = self.staging.operands[self.number][operand.name]
        return f"View{{{_begin(space)}, {space.lanes}, {space.pitch}}}"

    def _scratch(self, op: OpSpec) -> ScratchView:
        begin = f"w.scratch + {self.layout.scratch[self.number][op.name]}"
        if self.staging is not None:
            begin = _begin(self.staging.scratch[self.number][op.name])
        return ScratchView(self.scope.name(f"value {op.name}", op.name), begin, stored_lanes(op), pitch(op.width, self.tile_rows))

    def _const(self, const: Const) -> ConstView:
        name = self.scope.name(f"const {const.name}", const.name)
        space = self.staging.consts[self.number].get(const.name) if self.staging is not None else None
        width = const.shape[-1] if const.by_position else prod(const.shape)
        return ConstView(name, space and _begin(space), width, const.lanes, const.by_position)

    def _name_of(self, value: str) -> str:
        return self.scope.name(f"value {value}", value)


def _begin(space: Space) -> str:
    return f"{'w.scratch' if space.near else 'far_memory(w)'} + {space.offset}"


def _shape(buffer: Buffer) -> str:
    if buffer.payload == "best":
        return "largest logit and its index, per worker"
    what = f"[{buffer.lanes}][{buffer.width}]" if buffer.lanes > 1 else f"[{buffer.width}]"
    return f"{what} per column"
