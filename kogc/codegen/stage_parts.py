"""What the templates are told of one part of a stage: its rows, the ops of its epilogue, and where results go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kogc.codegen.layout import stage_outputs
from kogc.codegen.names import Scope
from kogc.codegen.stage_values import OperandView, RenderError, StageValues
from kogc.ir.program import OpSpec, Output, Part, Program

#: Ops that gather several lanes of an operand; in an epilogue they read it with access ``rows_all_lanes``.
_OVER_LANES = ("lane_sum", "lane_others", "lane_mean")


@dataclass(frozen=True)
class Tile:
    """One tile of an op's result and the expressions of its operands' tiles."""

    out: str
    args: tuple[str, ...]
    attrs: Any


@dataclass(frozen=True)
class Epilogue:
    """One epilogue op on the tiles of a unit. ``cos`` and ``sin`` are the rope tables at the column's position, ``table`` the row of
    an embedding there, ``operand`` the buffer value a lane reduction reads."""

    op: str
    name: str
    is_value: bool
    tiles: tuple[Tile, ...]
    cos: str | None = None
    sin: str | None = None
    table: str | None = None
    operand: OperandView | None = None


@dataclass(frozen=True)
class Load:
    """A vec made before the ops: a dot, or the rows of an operand or constant."""

    name: str
    expression: str


@dataclass(frozen=True)
class PartContext:
    """One part: its rows as a C++ type, its epilogue, and statements that hand the results on.

    ``finish`` names what is done with its rows; ``made`` the writes it contributes to; ``skips`` the write of the best logits when its dots are only for logits.
    """

    finish: str
    rows_type: str
    arity: int
    width: int
    loads: tuple[Load, ...]
    ops: tuple[Epilogue, ...]
    statements: tuple[str, ...]
    made: tuple[str, ...]
    skips: str | None


def part_context(program: Program, values: StageValues, part: Part, caches: Iterator[str], value_ops: frozenset[str]) -> PartContext:
    """Name everything in ``part``. ``caches`` yields the names of the caches its outputs append to, in order.

    Raises RenderError for an epilogue that needs what a unit's rows cannot give.
    """
    width = values.stage.part_rows(part)
    builder = _Epilogues(values, part, width, value_ops)
    ops = tuple(builder.op(spec) for spec in part.epilogue)
    statements = tuple(s for output in part.outputs for s in _store(program, values, part, builder, output, caches, width))
    logits = [output for output in part.outputs if output.kind == "logits"]
    skips = values.write_of(logits[0]).name if logits and len(part.outputs) == 1 else None
    return PartContext(
        values.scope.name(f"part {part.name}", f"finish_{part.name}"), _rows_type(part, width), part.arity, width,
        tuple(builder.loads.values()), ops, statements, tuple(dict.fromkeys(values.write_of(o).name for o in part.outputs)), skips,
    )  # fmt: skip


def _rows_type(part: Part, width: int) -> str:
    if part.unit != "rope":
        return f"ConsecutiveRows<{width}>"
    halves = "true" if part.rope["style"] == "half" else "false"
    return f"RopePairs<{width}, {part.rope['head_dim']}, {part.rope['rotary_dim']}, {halves}>"


class _Epilogues:
    """Turns the OpSpecs of a part into tiles with names; remembers what must be loaded first."""

    def __init__(self, values: StageValues, part: Part, width: int, value_ops: frozenset[str]) -> None:
        self.values, self.part, self.width, self.value_ops = values, part, width, value_ops
        self.tile_count = 2 if part.unit == "rope" else 1
        self.loads: dict[str, Load] = {}
        self._scope = Scope(values.scope)
        self._made: dict[str, tuple[str, ...]] = {}

    def op(self, spec: OpSpec) -> Epilogue:
        name = self._scope.name(f"op {spec.name}", spec.name)
        outs = tuple(f"{name}_{i}" for i in range(self.tile_count)) if self.tile_count > 1 else (name,)
        self._made[spec.name] = outs
        if spec.op == "rope":
            x, cos, sin = spec.inputs[:3]
            angles = self.part.rope["rotary_dim"] // 2
            return self._epilogue(spec, name, outs, (x,), cos=self._table(cos, angles), sin=self._table(sin, angles))
        if spec.op == "embed":
            return self._epilogue(spec, name, outs, (), table=self._table(spec.inputs[1], self.width))
        if spec.op in _OVER_LANES:
            operand = self.values.operand_view(spec.inputs[0])
            if operand is None:
                raise RenderError(f"stage {self.values.stage.name}: {spec.op} in an epilogue needs an exchanged value, not {spec.inputs[0]}")
            return self._epilogue(spec, name, outs, (), operand=operand)
        return self._epilogue(spec, name, outs, spec.inputs)

    def tiles(self, name: str) -> tuple[str, ...]:
        """The vec expressions of a value: an earlier op, a dot, the row of a part without dots, or rows loaded for the purpose."""
        if name in self._made:
            return self._made[name]
        source = self._source(name)
        cname = self._scope.name(f"rows {name}", name if name in ("dot0", "dot1") else f"{name}_rows")
        names = tuple(f"{cname}_{i}" for i in range(self.tile_count)) if self.tile_count > 1 else (cname,)
        for tile, out in enumerate(names):
            self.loads[out] = Load(out, source(tile))
        self._made[name] = names
        return names

    def _source(self, name: str):
        if name == "row" and not self.part.matrices:
            return lambda tile: "row[0][t]"
        if name in ("dot0", "dot1"):
            number = int(name[-1])
            return lambda tile: f"dot[{number + tile}][t]"
        pointer = self.values.rows(name, self.part, self.width)
        return lambda tile: f"load_rows<Rows>({pointer}, unit, {tile})"

    def _epilogue(self, spec: OpSpec, name: str, outs: tuple[str, ...], inputs: tuple[str, ...], **more) -> Epilogue:
        args = [self.tiles(one) for one in inputs if one not in ("token", "position")]
        tiles = tuple(Tile(out, tuple(arg[i] for arg in args), spec.attrs) for i, out in enumerate(outs))
        return Epilogue(spec.op, name, spec.op in self.value_ops, tiles, **more)

    def _table(self, name: str, width: int) -> str:
        row = self.values.table(name, width)
        if row is None:
            raise RenderError(f"stage {self.values.stage.name}: position table {name} is no constant of the stage")
        return row


# ── results ──


def _store(program: Program, values: StageValues, part: Part, builder: _Epilogues, output: Output, caches: Iterator[str], rows: int):
    """Statements that store one output's tiles of column t, and its probe."""
    tiles = builder.tiles(output.value)
    write = values.write_of(output)
    if output.kind == "logits":
        return [f"take_logits<Rows>(w, t, lane * {rows}, unit, {tiles[0]});"]
    if output.kind == "cache":
        stores = _append(program, values, part, output, next(caches), tiles, rows)
    else:
        stores = _publish(values, write.name, values.buffer(output.buffer), tiles, rows)
    return stores + _probe(values, part, output, tiles, rows)


def _publish(values: StageValues, view: str, buffer, tiles: tuple[str, ...], rows: int) -> list[str]:
    spread, lane = _lanes_to_write(values, buffer.lanes)
    to = f"{view}.at(t, {lane}){_beside(values, buffer.lanes, buffer.width, rows)}"
    return [f"{spread}store_rows<Rows>({to}, unit, {i}, {tile});" for i, tile in enumerate(tiles)]


def _lanes_to_write(values: StageValues, lanes: int) -> tuple[str, str]:
    """(loop header, lane expression) for a destination of ``lanes`` lanes: a stage without lanes fills all of them."""
    if lanes == 1:
        return "", "0"
    if values.stage.lanes == lanes:
        return "", "lane"
    return f"for (int each = 0; each < {lanes}; ++each) ", "each"


def _beside(values: StageValues, lanes: int, width: int, rows: int) -> str:
    """The offset of a lane's rows in a destination without lanes that holds them side by side."""
    return f" + lane * {rows}" if lanes == 1 and values.stage.lanes > 1 and width == values.stage.lanes * rows else ""


def _append(program: Program, values: StageValues, part: Part, output: Output, cache: str, tiles: tuple[str, ...], rows: int) -> list[str]:
    head_dim = next(c.head_dim for c in program.caches if c.key == output.caches[0])
    pitch = values.layout.cache_pitch(program.dtype, head_dim)
    at = f"{cache} + ((int64_t){values.own_lane} * {rows // head_dim} * CAPACITY + w.position[t]) * {pitch}"
    fresh = f"{values.write_of(output).name}.at(t, {'lane' if values.buffer(output.buffer).lanes > 1 else '0'})"
    return [f"append_rows<Rows, {head_dim}, {pitch}>(w, {at}, {fresh}, unit, {i}, {tile});" for i, tile in enumerate(tiles)]


def _probe(values: StageValues, part: Part, output: Output, tiles: tuple[str, ...], rows: int) -> list[str]:
    number = next(i for i, (one, _) in enumerate(stage_outputs(values.stage)) if one is output)
    entry = values.layout.probe_first[values.number, number]
    spread, lane = _lanes_to_write(values, entry.lanes)
    at = probe_at(values, number, lane) + _beside(values, entry.lanes, entry.width, rows)
    return [f"PROBE({spread}store_rows<Rows>({at}, unit, {i}, {tile});)" for i, tile in enumerate(tiles)]


def probe_at(values: StageValues, number: int, lane: str) -> str:
    """Where a probe build keeps output ``number`` of the stage for column t in ``lane``, as float*."""
    entry = values.layout.probe_first[values.number, number]
    column = entry.lanes * entry.width
    turns = f" + iteration * {values.layout.columns * column}" if values.iterations > 1 else ""
    return f"w.launch->probe + {entry.offset}{turns} + t * {column}" + (f" + {lane} * {entry.width}" if entry.lanes > 1 else "")
