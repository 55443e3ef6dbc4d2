"""The rolled program: what the templates express and the schedule deals out.

A program is a list of *segments*; a segment is a loop of ``count`` iterations over the same stages, with per-iteration
tables for what differs (weights, caches, windows). Code size depends on the number of segments, never on the depth.

Exchange between workers goes through *buffers*. All writes of a buffer are numbered through the step in execution
order: write ``k`` of step ``s`` has index ``s · writes_per_step + k`` and lives in slot ``index mod slots``. A stage
names the write it makes or needs as an affine function of the segment's iteration, so a carried residual, a value of the
same layer and a sum delayed by δ layers are all the same thing: a read of an earlier write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kogc.ir.ops.decode import rope_pairs


@dataclass(frozen=True)
class Affine:
    """``base + stride · iteration``: the in-step write number a stage makes or reads."""

    base: int
    stride: int = 0

    def at(self, iteration: int) -> int:
        return self.base + self.stride * iteration


@dataclass(frozen=True)
class Buffer:
    """A value that crosses workers.

    ``payload``: ``vector`` holds fp32 [lanes, width] per token; ``partials`` attention partials, fp32
    [lanes, heads/lane, splits, head_dim + 2] per token (accumulator, running maximum, sum of weights), width covering
    everything behind lanes; ``cache`` carries no data: it orders KV appends before their readers; ``best`` is one
    (logit, index) pair per worker and token. ``scope``: ``group`` when all readers lie in the writer's lane, ``grid`` when they
    lie in the writer's rank, else ``ranks``: then ``Output.sent_to`` tells which writes go where.
    """

    name: str
    payload: str
    lanes: int
    width: int
    writes_per_step: int
    slots: int
    scope: str = "grid"


@dataclass(frozen=True)
class Operand:
    """A buffer value a stage reads, under the name its ops use.

    ``access`` says which elements a worker needs, and so for whom it waits:
    ``lane`` the whole vector of the run's own lane · ``rank`` that of the worker's own rank (a lane per rank) · ``all_lanes`` the whole vector of every lane ·
    ``rows`` the worker's own rows in its own lane · ``rows_all_lanes`` its own rows in every lane ·
    ``heads`` q of the run's heads · ``records`` the partial results of the heads that the worker's own rows belong to ·
    ``cache`` no data, the KV appends of the run's heads · ``best`` every worker's pair.
    A value without lane axis has lanes = 1 and is read as ``lane`` 0 by everybody.
    """

    name: str
    buffer: str
    write: Affine
    access: str
    lanes: int
    width: int


@dataclass(frozen=True)
class Const:
    """A small fp32 constant (norm scale, bias, rope table) by weight or table key: one key per iteration, or one for all.

    ``shape`` is that of one lane; the stored weight has the lane axis in front (absent or 1 when ``lanes`` is 1). Rope
    tables are [capacity, rotary_dim/2], learned positions [positions, features].
    """

    name: str
    kind: str  # "weight" | "table"
    keys: tuple[str, ...]
    lanes: int
    shape: tuple[int, ...]

    @property
    def by_position(self) -> bool:
        """Whether it has a row for every position, of which a step reads its own."""
        return len(self.shape) == 2

    def key(self, iteration: int) -> str:
        return self.keys[iteration if len(self.keys) > 1 else 0]


@dataclass(frozen=True)
class OpSpec:
    """One decode op inside a stage. ``inputs`` name earlier OpSpecs, Operands, Consts, or the part's dots ``dot0``/``dot1``.

    ``token`` and ``position`` are implicit names. In a prologue ``lanes`` is the number of lanes of the result and
    ``scope`` tells whether it is computed for the run's own lane (``own``) or for every lane (``all``). What has one lane
    is the same for every lane, so an op with lanes may read it beside values with lanes. A reduction over lanes to one
    lane has scope ``all``. An epilogue may also read its rows of a prologue value. The ops of a part without matrices
    (``embed``, ``combine``) start from ``row``; those of a ``rows`` stage from rows of operands and of prologue results.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    lanes: int = 1
    width: int = 0
    scope: str = "own"


@dataclass(frozen=True)
class Matrix:
    """A weight matrix of a part, [rows, k] per lane: one key per iteration, ``rows_from`` its first row in the stored tensor."""

    keys: tuple[str, ...]
    lanes: int
    rows: int
    k: int
    rows_from: int = 0

    def key(self, iteration: int) -> str:
        return self.keys[iteration if len(self.keys) > 1 else 0]


@dataclass(frozen=True)
class Output:
    """A value that leaves a stage. ``kind``: ``buffer`` (publish), ``cache`` (append to ``caches`` and publish the order
    in ``buffer``), ``logits`` (to the host when it asks, and into the worker's running best, published in ``buffer``).

    ``sent_to``: the ranks whose memory the value is put into besides its maker's own, as a mask (bit r for rank r), one per
    iteration; empty when it never leaves a rank.
    """

    value: str
    kind: str
    buffer: str
    write: Affine
    caches: tuple[str, ...] = ()
    sent_to: tuple[int, ...] = ()


#: How a unit's rows are picked: ``row`` (arity 1), ``rope`` pairs (arity 2), ``gated`` gate/up rows (arity 2).
UNIT_ARITY = {"row": 1, "rope": 2, "gated": 2}


@dataclass(frozen=True)
class Part:
    """Rows of a matvec that share an epilogue. A *unit* is ``arity`` tiles of ``tile_rows`` rows, finished together.

    ``row``: tile rows are consecutive rows. ``gated``: tile 0 rows i of ``matrices[0]``, tile 1 rows i of ``matrices[1]``.
    ``rope``: pair p (counted through the heads of the lane) puts its first index in tile 0 and its second in tile 1.
    ``width``: output elements per lane of a part of a ``rows`` stage, which has no matrices.
    """

    name: str
    unit: str
    matrices: tuple[Matrix, ...]
    epilogue: tuple[OpSpec, ...]
    outputs: tuple[Output, ...]
    rope: Mapping[str, Any] | None = None  # style, head_dim, rotary_dim
    width: int = 0

    @property
    def arity(self) -> int:
        return UNIT_ARITY[self.unit]

    @property
    def rows(self) -> int:
        """Logical rows per lane of each matrix (= output elements per lane)."""
        return self.matrices[0].rows if self.matrices else self.width

    @property
    def k(self) -> int:
        return self.matrices[0].k

    def units(self, tile_rows: int) -> int:
        """Units per lane."""
        elements = self.rows // 2 if self.unit == "rope" else self.rows
        return -(-elements // tile_rows)


@dataclass(frozen=True)
class Attention:
    """Split-context attention of one stage: unit (kv head of the lane) · splits + split.

    ``caches`` holds (key cache, value cache) and ``windows`` the window (0 = full) per iteration. q heads of kv head g
    are g · group … within the lane. The result goes to ``output`` (a ``partials`` buffer).
    """

    q: str
    heads: int  # per lane
    kv_heads: int  # per lane
    head_dim: int
    scale: float
    softcap: float
    splits: int
    caches: tuple[tuple[str, str], ...]
    windows: tuple[int, ...]
    output: Output


@dataclass(frozen=True)
class Combine:
    """The splits of attention brought together by a stage of its own, so that nobody has to read everybody's partials.

    ``partials``: the operand (access ``records``) that holds ``splits`` records of each of a lane's ``heads`` heads.
    The lane's combined vector [heads · head_dim] is dealt in rows.
    """

    partials: str
    heads: int  # per lane
    head_dim: int
    splits: int

    @property
    def width(self) -> int:
        """Rows of a lane."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class Stage:
    """One stage of a segment. ``lanes`` is the lane count of its core; runs are dealt per lane.

    kinds: ``embed`` (ops after the table row in ``parts``: unit ``row``, no matrices — see ``embed_table``), ``matvec``,
    ``attention``, ``combine`` (ops after the rows of ``combine`` in ``parts``, as for ``embed``), ``rows`` (ops on the
    ``width`` rows per lane of each of ``parts``, without matrices), ``sample``. ``name`` is
    an identifier made from the model's own module names; ``title`` is readable.
    """

    name: str
    title: str
    kind: str
    lanes: int
    operands: tuple[Operand, ...] = ()
    consts: tuple[Const, ...] = ()
    prologue: tuple[OpSpec, ...] = ()
    prologue_outputs: tuple[Output, ...] = ()
    vector: str | None = None
    vector_width: int = 0
    parts: tuple[Part, ...] = ()
    attention: Attention | None = None
    embed_table: str | None = None
    embed_width: int = 0
    combine: Combine | None = None

    @property
    def read_before(self) -> set[str]:
        """Names that the prologue and the dots read."""
        return {self.vector, *(name for op in self.prologue for name in op.inputs)}

    @property
    def read_after(self) -> set[str]:
        """Names that the epilogues of all parts read."""
        return {name for part in self.parts for op in part.epilogue for name in op.inputs}

    @property
    def row_width(self) -> int:
        """Rows per lane that an ``embed`` or ``combine`` stage's part starts from; 0 for other stages."""
        return self.combine.width if self.combine else self.embed_width

    def part_rows(self, part: Part) -> int:
        """Output elements per lane of one of the stage's parts."""
        return self.row_width or part.rows

    def units(self, part: int, tile_rows: int) -> int:
        """Units per lane of part ``part`` (part 0 for embed, attention and combine)."""
        if self.row_width:
            return -(-self.row_width // tile_rows)
        if self.attention:
            return self.attention.kv_heads * self.attention.splits
        return self.parts[part].units(tile_rows)


@dataclass(frozen=True)
class Segment:
    """A loop over ``stages``. ``name`` is an identifier (``layers_0_1``); ``count`` iterations."""

    name: str
    count: int
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class Cache:
    """A KV cache: [kv_heads over all lanes, capacity, head_dim] in the artifact's dtype."""

    key: str
    kv_heads: int
    head_dim: int
    capacity: int


@dataclass(frozen=True)
class Program:
    """The rolled decode step. ``dtype`` is the storage dtype of weights and caches.

    ``ranks``: separate memories among which workers are split evenly, in order; each holds its workers' weights, its lanes'
    caches, and a copy of every exchange buffer, which other ranks' workers write to (``Output.sent_to``) and never read.
    """

    model: str
    dtype: str
    vocab: int
    capacity: int
    step_tokens: tuple[int, ...]
    buffers: tuple[Buffer, ...]
    caches: tuple[Cache, ...]
    segments: tuple[Segment, ...]
    ranks: int = 1
    meta: Mapping[str, Any] = field(default_factory=dict)

    def buffer(self, name: str) -> Buffer:
        return next(b for b in self.buffers if b.name == name)

    def instances(self) -> Iterator[tuple[int, int, int, Stage]]:
        """(segment index, iteration, stage index, stage) in execution order of one step."""
        for seg_index, segment in enumerate(self.segments):
            for iteration in range(segment.count):
                for stage_index, stage in enumerate(segment.stages):
                    yield seg_index, iteration, stage_index, stage


@dataclass(frozen=True)
class Run:
    """Units ``first`` … ``first + count`` of ``part`` in ``lane``, done by one worker in one stage instance."""

    lane: int
    part: int
    first: int
    count: int


@dataclass(frozen=True)
class Share:
    """Rows ``first`` … ``last`` of ``lane`` that a worker publishes of prologue output number ``output``."""

    output: int
    lane: int
    first: int
    last: int


@dataclass(frozen=True)
class WorkerStage:
    """What one worker does in one stage instance. ``awaits[i]`` are worker intervals [w0, w1) that make what it needs of
    operand i, in ascending order, not overlapping; empty where an earlier wait already covers it or nothing is needed."""

    runs: tuple[Run, ...]
    awaits: tuple[tuple[tuple[int, int], ...], ...]
    shares: tuple[Share, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """Who does what: ``work[segment][stage][iteration][worker]``. ``tile_rows`` rows make a tile."""

    workers: int
    tile_rows: int
    work: tuple[tuple[tuple[tuple[WorkerStage, ...], ...], ...], ...]

    def at(self, segment: int, stage: int, iteration: int, worker: int) -> WorkerStage:
        return self.work[segment][stage][iteration][worker]


def unit_rows(part: Part, tile_rows: int, unit: int) -> np.ndarray:
    """Logical rows [arity, tile_rows] of ``unit`` within its lane; −1 is padding. Row −1 is packed as zeros.

    For ``gated`` both tiles hold the same row numbers, of the gate and of the up matrix.
    """
    elements = np.arange(unit * tile_rows, (unit + 1) * tile_rows)
    if part.unit != "rope":
        rows = np.where(elements < part.rows, elements, -1)
        return np.repeat(rows[None], part.arity, 0)
    head_dim = part.rope["head_dim"]
    pairs = rope_pairs(part.rope["style"], head_dim, part.rope["rotary_dim"])
    head, pair = np.divmod(elements, head_dim // 2)
    rows = head[:, None] * head_dim + pairs[pair]
    return np.where(elements[:, None] < part.rows // 2, rows, -1).T
