"""Stages of their own for sums over lanes, where every worker would have to read whole vectors of all lanes for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kogc.ir.passes.fuse_names import Unique
from kogc.ir.program import Affine, Buffer, Operand, OpSpec, Output, Part, Program, Segment, Stage

#: Ops of which a row of the result needs that row of the inputs alone, in one lane or in all.
_BY_ROWS = frozenset({"add", "mul", "scale", "lane_sum", "lane_mean", "lane_others"})

#: Those of them that read other lanes: only of what was received, for of what it computes a worker has rows of its own lane.
_OVER_LANES = frozenset({"lane_sum", "lane_mean", "lane_others"})

#: How a stage that makes rows reads what a prologue read whole.
_ACCESS = {"lane": "rows", "all_lanes": "rows_all_lanes"}


def separate_rows(program: Program, most_words: int) -> Program:
    """The program in which no prologue reads more than ``most_words`` words of several lanes.

    Where one does, to add lanes up, a ``rows`` stage comes before it: its rows are dealt to workers, each of which reads
    only its own rows in all lanes and publishes the result. What norms all lanes before they are added up goes into a
    ``rows`` stage before that one, lane by lane. What the stage published of these values the new stages publish. A stage
    that mixes rows of all lanes with anything else stays as it is.
    """
    names = Unique(buffer.name for buffer in program.buffers)
    made: list[Buffer] = []
    segments = []
    for segment in program.segments:
        stages = [one for stage in segment.stages for one in _Separation(program, segment, stage, most_words, names, made).stages()]
        segments.append(replace(segment, stages=tuple(stages)))
    changed = replace(program, buffers=(*program.buffers, *made), segments=tuple(segments))
    stages = {"stages": sum(1 for _ in changed.instances())} if "stages" in program.meta else {}
    return replace(changed, meta={**program.meta, **stages})


class _Separation:
    """One stage taken apart. New buffers are appended to ``made`` and named by ``names``."""

    def __init__(self, program: Program, segment: Segment, stage: Stage, most_words: int, names: Unique, made: list[Buffer]) -> None:
        self.program, self.segment, self.stage, self.most_words = program, segment, stage, most_words
        self.names, self.made, self.before = names, made, []

    def stages(self) -> tuple[Stage, ...]:
        if self.stage.kind != "matvec" or not _wide(self.stage, self.most_words):
            return (self.stage,)
        whole, buffers = self.stage, len(self.made)
        for op in [op for op in self.stage.prologue if self._norms_all_lanes(op)]:
            self._separate_norm(op)
        moved = _row_ops(self.stage, self.most_words)
        frontier = _frontier(self.stage, moved)
        if not moved or _wide(_without(self.stage, moved), self.most_words) or not _alike(frontier):
            del self.made[buffers:]
            return (whole,)
        self._separate_sum(moved, frontier)
        return (*self.before, self.stage)

    def _norms_all_lanes(self, op: OpSpec) -> bool:
        wide = _wide(self.stage, self.most_words)
        return op.op in ("rms_norm", "layer_norm") and op.scope == "all" and op.lanes > 1 and op.inputs[0] in wide

    def _separate_norm(self, op: OpSpec) -> None:
        """A stage in which every worker norms the vector of its own lane and publishes its own rows."""
        stage, operand = self.stage, _operand(self.stage, op.inputs[0])
        buffer, write = self._buffer(op)
        consts = tuple(const for const in stage.consts if const.name in op.inputs)
        outputs = (Output(op.name, "buffer", buffer.name, write), *_published(stage, op.name))
        part = Part(op.name, "row", (), (), outputs, width=op.width)
        self.before.append(
            Stage(
                f"{stage.name}_{op.name}", f"{stage.title}, lanes normed", "rows", op.lanes, (replace(operand, access="lane"),), consts,
                prologue=(replace(op, scope="own"),), parts=(part,),
            )
        )  # fmt: skip
        self.stage = _reading(_without(stage, (op,)), Operand(op.name, buffer.name, write, "all_lanes", op.lanes, op.width))

    def _separate_sum(self, moved: Sequence[OpSpec], frontier: Sequence[OpSpec]) -> None:
        """The stage that makes rows of the ``frontier`` by the ``moved`` ops; the rest reads what it publishes."""
        stage, read = self.stage, {name for op in moved for name in op.inputs}
        outputs, operands = [], []
        for op in frontier:
            published = _published(stage, op.name)
            place = (published[0].buffer, published[0].write) if published else None
            buffer, write = place or (self._buffer(op)[0].name, self._write())
            outputs += published or (Output(op.name, "buffer", buffer, write),)
            operands.append(Operand(op.name, buffer, write, "lane", op.lanes, op.width))
        rows = Stage(
            f"{stage.name}_{frontier[0].name}", f"{stage.title}, lanes brought together", "rows", frontier[0].lanes,
            tuple(replace(o, access=_ACCESS[o.access]) for o in stage.operands if o.name in read), tuple(c for c in stage.consts if c.name in read),
            parts=(Part(frontier[0].name, "row", (), tuple(moved), tuple(outputs), width=frontier[0].width),),
        )  # fmt: skip
        self.before.append(rows)
        rest = _without(stage, moved)
        for operand in operands:
            rest = _reading(rest, operand)
        self.stage = rest

    def _write(self) -> Affine:
        return Affine(0, 1 if self.segment.count > 1 else 0)

    def _buffer(self, op: OpSpec) -> tuple[Buffer, Affine]:
        """A new buffer for a value that is made once in every iteration."""
        self.made.append(Buffer(self.names(op.name), "vector", op.lanes, op.width, self.segment.count, 1))
        return self.made[-1], self._write()


def _wide(stage: Stage, most_words: int) -> set[str]:
    """Operands that workers read whole in all lanes, and that are too much."""
    return {o.name for o in stage.operands if o.access == "all_lanes" and o.lanes > 1 and o.lanes * o.width > most_words}


def _row_ops(stage: Stage, most_words: int) -> tuple[OpSpec, ...]:
    """The ops of the prologue that can be done row by row and depend on wide operands, and those they need, in order."""
    received = {o.name for o in stage.operands if o.access in _ACCESS}
    sources = received | {const.name for const in stage.consts}
    ops = {op.name: op for op in stage.prologue}
    able: set[str] = set()
    dependent = _wide(stage, most_words)
    for op in stage.prologue:
        readable = received if op.op in _OVER_LANES else sources | able
        if op.op in _BY_ROWS and readable.issuperset(op.inputs):
            able.add(op.name)
            dependent |= {op.name} if dependent & set(op.inputs) else set()
    wanted = [name for name in ops if name in able and name in dependent]
    needed = set(wanted)
    for name in reversed(list(ops)):
        if name in needed:
            needed |= {source for source in ops[name].inputs if source in ops}
    return tuple(op for op in stage.prologue if op.name in needed)


def _frontier(stage: Stage, moved: Sequence[OpSpec]) -> tuple[OpSpec, ...]:
    """Those of the ``moved`` ops whose results the rest of the stage reads, or publishes."""
    names = {op.name for op in moved}
    used = {stage.vector, *(output.value for output in stage.prologue_outputs)}
    used |= {name for op in stage.prologue if op.name not in names for name in op.inputs}
    used |= stage.read_after
    return tuple(op for op in moved if op.name in used)


def _alike(frontier: Sequence[OpSpec]) -> bool:
    """Whether the same rows make all of these, and whoever reads them reads no lane but its own."""
    return len({(op.lanes, op.width) for op in frontier}) == 1 and all(op.lanes == 1 or op.scope == "own" for op in frontier)


def _published(stage: Stage, value: str) -> tuple[Output, ...]:
    return tuple(output for output in stage.prologue_outputs if output.value == value)


def _operand(stage: Stage, name: str) -> Operand:
    return next(operand for operand in stage.operands if operand.name == name)


def _without(stage: Stage, ops: Iterable[OpSpec]) -> Stage:
    """The stage without ``ops`` of its prologue, what it published of them, and what only they read."""
    gone = {op.name for op in ops}
    rest = replace(stage, prologue=tuple(op for op in stage.prologue if op.name not in gone))
    read = rest.read_before | rest.read_after
    return replace(
        rest,
        operands=tuple(operand for operand in stage.operands if operand.name in read),
        consts=tuple(const for const in stage.consts if const.name in read),
        prologue_outputs=tuple(output for output in stage.prologue_outputs if output.value not in gone),
    )


def _reading(stage: Stage, operand: Operand) -> Stage:
    """The stage with ``operand`` where it read a result of that name: whole before the dots, its own rows after them."""
    names = Unique([one.name for one in (*stage.operands, *stage.consts, *stage.prologue, *(op for part in stage.parts for op in part.epilogue))])
    operands, parts = list(stage.operands), stage.parts
    if operand.name in stage.read_before:
        operands.append(operand)
    if operand.name in stage.read_after:
        rows = replace(operand, name=names(f"{operand.name}_rows"), access="rows")
        operands.append(rows)
        parts = tuple(replace(part, epilogue=tuple(_renamed(op, operand.name, rows.name) for op in part.epilogue)) for part in parts)
    return replace(stage, operands=tuple(operands), parts=parts)


def _renamed(op: OpSpec, old: str, new: str) -> OpSpec:
    return replace(op, inputs=tuple(new if name == old else name for name in op.inputs))
