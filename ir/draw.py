"""The stage graph as a picture: an SVG written by hand, so that no drawing program has to be installed.

Stages stand below each other in execution order, a frame around each loop. A value read by the next stage is a short
arrow; one that skips stages runs in a track on the right; one carried from an earlier iteration or step runs in a dashed
track on the left.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from kogc.ir.program import Buffer, Part, Program, Stage

_BOX_WIDTH, _TRACK, _PAD, _LINE, _GAP = 430, 22, 16, 17, 34
_COLOURS = {"embed": "#e7f0e4", "matvec": "#e4ecf7", "attention": "#f8ecdc", "combine": "#f5e4e0", "rows": "#eaf3f3", "sample": "#efe6f3"}
_INK, _EDGE, _CARRIED = "#1f2933", "#52606d", "#b4552d"


@dataclass(frozen=True)
class Edge:
    """A value that stage ``reader`` takes from stage ``writer`` (positions in the drawing), ``age`` iterations or steps old.

    ``age`` 0: made earlier in the same pass through the stages. ``unit`` is what an older value's age counts.
    """

    writer: int
    reader: int
    buffer: str
    age: int = 0
    unit: str = "layer"

    @property
    def label(self) -> str:
        if not self.age:
            return self.buffer
        return f"{self.buffer}, {self.age} {self.unit}{'s' if self.age > 1 else ''} old"


def stage_edges(program: Program) -> list[Edge]:
    """Every value that crosses stages, once per pair of stages and age, in drawing order."""
    numbers = {}
    for seg, segment in enumerate(program.segments):
        for index in range(len(segment.stages)):
            numbers[seg, index] = len(numbers)
    buffers = {buffer.name: buffer for buffer in program.buffers}
    writers = _writers(program)
    edges = {}
    for seg, iteration, index, stage in program.instances():
        for operand in stage.operands:
            steps_back, write = divmod(operand.write.at(iteration), buffers[operand.buffer].writes_per_step)
            made = writers.get((operand.buffer, write))
            if made is None:
                continue
            edge = _edge(made, (seg, iteration, index), -steps_back, numbers, operand.buffer)
            edges[edge] = None
    return sorted(edges, key=lambda edge: (edge.writer, edge.reader, edge.buffer, edge.age))


def _writers(program: Program) -> dict[tuple[str, int], tuple[int, int, int]]:
    """(buffer, in-step write number) → the stage instance that makes it."""
    made = {}
    for seg, iteration, index, stage in program.instances():
        for output in stage_outputs(stage):
            made[output.buffer, output.write.at(iteration)] = (seg, iteration, index)
    return made


def stage_outputs(stage: Stage) -> list:
    """All outputs of a stage: its prologue's, its parts', its attention's."""
    outputs = [*stage.prologue_outputs, *(output for part in stage.parts for output in part.outputs)]
    return outputs + ([stage.attention.output] if stage.attention else [])


def _edge(made: tuple, read: tuple, steps_back: int, numbers: dict, buffer: str) -> Edge:
    writer, reader = numbers[made[0], made[2]], numbers[read[0], read[2]]
    if steps_back > 0:
        return Edge(writer, reader, buffer, steps_back, "step")
    return Edge(writer, reader, buffer, read[1] - made[1] if made[0] == read[0] else 0)


def draw(program: Program) -> str:
    """The stage graph of ``program`` as the text of an SVG file."""
    boxes = _boxes(program)
    edges = stage_edges(program)
    adjacent = [e for e in edges if e.age == 0 and e.reader == e.writer + 1]
    skipping = _tracks([e for e in edges if e.age == 0 and e.reader != e.writer + 1])
    carried = _tracks([e for e in edges if e.age])
    left = _PAD * 2 + _TRACK * (1 + max(carried.values(), default=0))
    width = left + _BOX_WIDTH + _TRACK * (2 + max(skipping.values(), default=0)) + 220
    height = boxes[-1].bottom + 2 * _PAD
    parts = [_header(program, width, height)]
    parts += _frames(program, boxes, left)
    parts += [box.svg(left) for box in boxes]
    parts += [_straight(boxes, group, left) for group in _by_pair(adjacent)]
    parts += [_curve(boxes, edge, left + _BOX_WIDTH, _TRACK * (track + 1), _EDGE) for edge, track in skipping.items()]
    parts += [_curve(boxes, edge, left, -_TRACK * (track + 1), _CARRIED) for edge, track in carried.items()]
    return "\n".join([*parts, "</svg>", ""])


# ── boxes ──


@dataclass(frozen=True)
class _Box:
    top: int
    kind: str
    lines: tuple[str, ...]

    @property
    def bottom(self) -> int:
        return self.top + _LINE * len(self.lines) + 12

    @property
    def middle(self) -> float:
        return (self.top + self.bottom) / 2

    def svg(self, x: int) -> str:
        bold = [' font-weight="bold"'] + [""] * len(self.lines)
        rows = [
            f'<text x="{x + 10}" y="{self.top + 19 + _LINE * i}"{bold[i]}>{escape(line)}</text>' for i, line in enumerate(self.lines)
        ]
        frame = f'<rect x="{x}" y="{self.top}" width="{_BOX_WIDTH}" height="{self.bottom - self.top}" rx="6" fill="{_COLOURS.get(self.kind, "#eee")}" stroke="{_EDGE}"/>'
        return "\n".join([frame, *rows])


def _boxes(program: Program) -> list[_Box]:
    boxes, top = [], 78
    for segment in program.segments:
        top += _LINE
        for stage in segment.stages:
            boxes.append(_Box(top, stage.kind, tuple(_clip(line) for line in _stage_lines(stage))))
            top = boxes[-1].bottom + _GAP
    return boxes


def _stage_lines(stage: Stage) -> list[str]:
    lanes = f" · {stage.lanes} lanes" if stage.lanes > 1 else ""
    lines = [f"{stage.title}  ({stage.kind}{lanes})"]
    if stage.prologue:
        lines.append("first: " + " → ".join(op.op for op in stage.prologue))
    lines += [_part_line(part) for part in stage.parts if part.matrices]
    if stage.combine:
        lines.append(f"{stage.combine.heads} heads of {stage.combine.head_dim}, {stage.combine.splits} splits")
    if stage.attention:
        a = stage.attention
        window = ", ".join(sorted({f"window {w}" if w else "full" for w in a.windows}))
        lines.append(f"{a.heads}/{a.kv_heads} heads of {a.head_dim}, {a.splits} splits, {window}")
    return lines


def _part_line(part: Part) -> str:
    after = " → ".join(op.op for op in part.epilogue)
    return f"{part.name}: {len(part.matrices) * part.rows}×{part.k}" + (f" → {after}" if after else "")


def _clip(line: str, width: int = 62) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"


def _frames(program: Program, boxes: list[_Box], left: int) -> list[str]:
    frames, at = [], 0
    for segment in program.segments:
        inside = boxes[at : at + len(segment.stages)]
        at += len(segment.stages)
        top = inside[0].top - _LINE - 4
        loop = f"{segment.name}, {segment.count} times" if segment.count > 1 else segment.name
        frames.append(
            f'<rect x="{left - 8}" y="{top}" width="{_BOX_WIDTH + 16}" height="{inside[-1].bottom - top + 8}" rx="8" '
            f'fill="none" stroke="#9aa5b1" stroke-dasharray="{"0" if segment.count > 1 else "3 4"}"/>'
        )
        frames.append(f'<text x="{left}" y="{top + 14}" fill="{_EDGE}">{escape(loop)}</text>')
    return frames


# ── edges ──


def _tracks(edges: list[Edge]) -> dict[Edge, int]:
    """A track for every edge, so that edges over the same stages do not share one."""
    tracks: dict[Edge, int] = {}
    for edge in sorted(edges, key=lambda e: abs(e.reader - e.writer)):
        low, high = sorted((edge.writer, edge.reader))
        taken = {t for e, t in tracks.items() if max(e.writer, e.reader) >= low and min(e.writer, e.reader) <= high}
        tracks[edge] = next(t for t in range(len(edges) + 1) if t not in taken)
    return tracks


def _by_pair(edges: list[Edge]) -> list[list[Edge]]:
    pairs: dict[tuple[int, int], list[Edge]] = {}
    for edge in edges:
        pairs.setdefault((edge.writer, edge.reader), []).append(edge)
    return list(pairs.values())


def _straight(boxes: list[_Box], edges: list[Edge], left: int) -> str:
    x = left + _BOX_WIDTH // 2
    start, end = boxes[edges[0].writer].bottom, boxes[edges[0].reader].top
    label = escape(", ".join(edge.buffer for edge in edges))
    return (
        f'<path d="M{x} {start}V{end - 2}" stroke="{_EDGE}" fill="none" marker-end="url(#tip)"/>'
        f'<text x="{x + 8}" y="{start + 21}" fill="{_EDGE}">{label}</text>'
    )


def _curve(boxes: list[_Box], edge: Edge, x: int, reach: int, colour: str) -> str:
    """A bracket from writer to reader beside the boxes, its label at the reader."""
    start, end = boxes[edge.writer].middle - 5, boxes[edge.reader].middle + 5
    dash = ' stroke-dasharray="5 3"' if edge.age else ""
    bend = x + reach
    label = f'<title>{escape(edge.label)}</title>'
    line = f'<path d="M{x} {start}H{bend}V{end}H{x + (2 if reach > 0 else -2)}" stroke="{colour}" fill="none"{dash} marker-end="url(#tip)"/>'
    if reach > 0:
        return f'<g>{label}{line}<text x="{bend + 5}" y="{(start + end) / 2 + 4}" fill="{colour}">{escape(edge.label)}</text></g>'
    return (
        f'<g>{label}{line}<text x="{bend - 4}" y="{(start + end) / 2}" fill="{colour}" text-anchor="middle" '
        f'transform="rotate(-90 {bend - 4} {(start + end) / 2})">{escape(edge.label)}</text></g>'
    )


def _header(program: Program, width: int, height: int) -> str:
    vectors = sum(_crosses(buffer) for buffer in program.buffers)
    title = f"{program.model}: {sum(len(s.stages) for s in program.segments)} stages, {vectors} values between workers"
    note = "dashed: carried over from an earlier layer or step" if any(e.age for e in stage_edges(program)) else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="11.5">'
        f'<style>text{{fill:{_INK}}}</style>'
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{_EDGE}"/></marker></defs>'
        f'<rect width="{width}" height="{height}" fill="#fff"/>'
        f'<text x="{_PAD}" y="28" font-size="16" font-weight="bold">{escape(title)}</text>'
        f'<text x="{_PAD}" y="48" fill="{_EDGE}">{note}</text>'
    )


def _crosses(buffer: Buffer) -> bool:
    return buffer.payload != "cache"
