"""``--dump-ir``: the result of every pass as files a person can read and a program can load."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from kogc.errors import OutputFailure
from kogc.ir.graph import Graph
from kogc.ir.program import Output, Program
from kogc.ir.serialize import graph_to_json, to_json
from kogc.ir.stages import StageGroup, StagePlan
from kogc.ir.text import to_text


class Dump:
    """Writes ``NN-pass.txt`` and ``NN-pass.json`` into a folder, in the order of the passes; nothing without a folder."""

    def __init__(self, folder: str | Path | None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._count = 0

    def __call__(self, name: str, value: Any, suffix: str = ".txt") -> None:
        """Write what the pass ``name`` made: a graph, a stage plan, a program, a dataclass, or source text, which gets ``suffix``.

        Raises OutputFailure naming the folder.
        """
        if self._folder is None:
            return
        self._count += 1
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for ending, text in ({suffix: value} if isinstance(value, str) else _forms(value)).items():
                (self._folder / f"{self._count:02d}-{name}{ending}").write_text(text, encoding="utf-8")
        except OSError as error:
            raise OutputFailure(f"cannot write into {self._folder}: {error.strerror}; choose another folder for --dump-ir") from None


def _forms(value: Any) -> dict[str, str]:
    """File suffix → text."""
    if isinstance(value, Graph):
        return {".txt": to_text(value), ".json": graph_to_json(value)}
    if isinstance(value, StagePlan):
        stages = [dataclasses.asdict(stage) for stage in value.stages]
        plan = json.dumps({"graph": json.loads(graph_to_json(value.graph)), "stages": stages})
        return {".txt": "".join(map(_stage_text, value.stages)) + "\n" + to_text(value.graph), ".json": plan}
    if isinstance(value, Program):
        return {".txt": program_text(value), ".json": to_json(value)}
    return {".json": json.dumps(dataclasses.asdict(value))}


def _stage_text(stage: StageGroup) -> str:
    lines = [f"stage {stage.name} ({stage.kind})"]
    if stage.prologue:
        lines.append(f"  prologue {', '.join(stage.prologue)}")
    if stage.prologue_outputs:
        lines.append(f"  publishes {', '.join(stage.prologue_outputs)}")
    if stage.core:
        lines.append(f"  core {stage.core}")
    for part in stage.parts:
        lines.append(f"  part {', '.join(part.linears) or '-'} -> {', '.join(part.epilogue) or '-'} -> {', '.join(part.outputs)}")
    return "\n".join(lines) + "\n"


def program_text(program: Program) -> str:
    """The rolled program as an outline: buffers, then loops with their stages."""
    lines = [f"program {program.model}: {program.dtype}, vocabulary {program.vocab}, capacity {program.capacity}"]
    lines += [
        f"buffer {b.name}: {b.payload} [{b.lanes}, {b.width}], {b.writes_per_step} writes a step in {b.slots} slots, {b.scope}"
        for b in program.buffers
    ]
    for segment in program.segments:
        lines.append(f"segment {segment.name} × {segment.count}")
        for stage in segment.stages:
            lines.append(f"  stage {stage.name} ({stage.kind}, {stage.lanes} lanes): {stage.title}")
            lines += [f"    reads {o.buffer} write {_affine(o.write)} ({o.access}) as {o.name}" for o in stage.operands]
            lines += [f"    first {op.name} = {op.op}({', '.join(op.inputs)})" for op in stage.prologue]
            lines += [f"    publishes {o.value} to {_destination(o)}" for o in stage.prologue_outputs]
            for part in stage.parts:
                shapes = " and ".join(f"{m.keys[0]} [{m.rows}, {m.k}]" for m in part.matrices)
                lines.append(f"    part {part.name} ({part.unit}) of {shapes or 'no matrix'}")
                lines += [f"      then {op.name} = {op.op}({', '.join(op.inputs)})" for op in part.epilogue]
                lines += [f"      {o.kind} {o.value} to {_destination(o)}" for o in part.outputs]
            if stage.combine:
                c = stage.combine
                lines.append(f"    combines {c.splits} splits of {c.heads} heads of {c.head_dim} in {c.partials}")
            if stage.attention:
                a = stage.attention
                lines.append(f"    attends with {a.heads}/{a.kv_heads} heads of {a.head_dim} in {a.splits} splits to {a.output.buffer}")
    return "\n".join(lines) + "\n"


def _destination(output: Output) -> str:
    """Buffer and write, and in which iterations the value goes to other ranks."""
    sent = [str(iteration) for iteration, ranks in enumerate(output.sent_to) if ranks]
    return f"{output.buffer} write {_affine(output.write)}" + (f", sent in iterations {', '.join(sent)}" if sent else "")


def _affine(write: Any) -> str:
    return f"{write.base} + {write.stride}·i" if write.stride else str(write.base)
