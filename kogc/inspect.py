"""What there is to know about an artifact without running anything from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kogc.artifact import Artifact
from kogc.artifact_manifest import Manifest
from kogc.codegen.layout import stage_outputs
from kogc.ir.program import Program, Segment, Stage
from kogc.targets import target_facts, target_names
from kogc.targets.toolchains import load_toolchain
from kogc.traffic import Traffic, traffic


_DESKTOP_GB_S = 20.0


@dataclass(frozen=True)
class StageRow:
    """One stage of the emitted code. ``bytes`` are the weights it streams per token over all its iterations."""

    segment: str
    name: str
    kind: str
    count: int
    waits_for: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Summary:
    """The figures of ``kogc inspect --summary``.

    ``exchanges_per_layer``: stages of one layer that wait for a value another worker made, averaged over the layers.
    ``traffic`` is counted at context position ``position``; ``file_bytes`` is the artifact's size. ``resources``: what
    the toolchain recorded of the binary, ``resources_line``: the same in one line; None where there is nothing to tell.
    ``tuned``: knobs that `kogc tune` has set, with their values; ``alternative``: numbers that the compiler has changed because
    the kernel would not have fitted into registers with those in target.toml. ``workers`` are those of a rank; ``rank_exchanges``
    the values of a token that ranks send each other, in groups that are made together.
    """

    model: str
    target: str
    dtype: str
    workers: int
    ranks: int
    rank_exchanges: int
    context: int
    layers: int
    stages: tuple[StageRow, ...]
    exchanges_per_layer: float
    traffic: Traffic
    position: int
    source_lines: int
    file_bytes: int
    resources: Mapping[str, Any] | None
    resources_line: str | None
    tuned: Mapping[str, int]
    alternative: Mapping[str, int]

    def predicted_tok_s(self, gigabytes_per_second: float) -> float:
        """Tokens per second of a machine that streams without gaps."""
        return self.traffic.tokens_per_second(gigabytes_per_second)


def summarize(artifact: Artifact, position: int | None = None) -> Summary:
    """Read the figures out of an artifact; ``position`` defaults to half its context."""
    program, manifest = artifact.program, artifact.manifest
    at = manifest.context // 2 if position is None else position
    layers = count_layers(program)
    exchanges = sum(1 for *_, stage in program.instances() if _in_layer(stage) and waits(program, stage))
    return Summary(
        model=manifest.model,
        target=manifest.target,
        dtype=manifest.dtype,
        workers=manifest.workers,
        ranks=manifest.ranks,
        rank_exchanges=_rank_exchanges(program),
        context=manifest.context,
        layers=layers,
        stages=tuple(_rows(program)),
        exchanges_per_layer=exchanges / max(layers, 1),
        traffic=traffic(program, at),
        position=at,
        source_lines=artifact.source.count("\n"),
        file_bytes=artifact.path.stat().st_size,
        resources=manifest.meta.get("resources"),
        resources_line=_resources_line(manifest),
        tuned=manifest.meta.get("tuned", {}),
        alternative=manifest.meta.get("alternative", {}),
    )


def usual_bandwidth(artifact: Artifact) -> float:
    """GB/s of the artifact's machine: what its target.toml says, else those of a desktop's memory."""
    target = artifact.manifest.target
    return target_facts(target).get("bandwidth_gb_s", _DESKTOP_GB_S) if target in target_names() else _DESKTOP_GB_S


def _resources_line(manifest: Manifest) -> str | None:
    """None also for an artifact whose target this kogc does not have."""
    return load_toolchain(manifest.target).describe(manifest.meta) if manifest.target in target_names() else None


def count_layers(program: Program) -> int:
    """Layers of the model: one attention each."""
    return sum(1 for *_, stage in program.instances() if stage.attention)


def waits(program: Program, stage: Stage) -> tuple[str, ...]:
    """Names of the buffers that ``stage`` reads data from."""
    return tuple(dict.fromkeys(o.buffer for o in stage.operands if program.buffer(o.buffer).payload != "cache"))


def _rank_exchanges(program: Program) -> int:
    sent = {
        (output.buffer, output.write.at(iteration))
        for _, iteration, _, stage in program.instances()
        for output, _ in stage_outputs(stage)
        if output.sent_to and output.sent_to[iteration]
    }
    return len(sent)


def _in_layer(stage: Stage) -> bool:
    heads = any(output.kind == "logits" for part in stage.parts for output in part.outputs)
    return stage.kind in ("matvec", "attention", "combine", "rows") and not heads


def _rows(program: Program) -> Iterator[StageRow]:
    for segment in program.segments:
        for stage in segment.stages:
            yield _row(program, segment, stage)


def _row(program: Program, segment: Segment, stage: Stage) -> StageRow:
    alone = Program(**{**vars(program), "segments": (Segment(segment.name, segment.count, (stage,)),)})
    return StageRow(segment.name, stage.name, stage.kind, segment.count, waits(program, stage), traffic(alone, 0).weights)
