"""From a built kernel to a file: pack the weights, run the gate, give the file its name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kogc import __version__
from kogc.artifact import IR, PROGRAM, TOKENIZER, weights_name
from kogc.artifact_manifest import Manifest, Section
from kogc.artifact_writer import ArtifactWriter
from kogc.codegen.launch import LAUNCH_VERSION
from kogc.codegen.pack import pack_share, pack_stream
from kogc.codegen.pack_index import weight_bytes
from kogc.codegen.rank_pack import rank_schedules
from kogc.compile_build import Built
from kogc.compile_passes import Planned
from kogc.frontend.model_input import ModelInput
from kogc.ir.passes.views import ViewedWeights
from kogc.ir.serialize import graph_to_json, to_json
from kogc.targets import Target
from kogc.targets.toolchains import load_toolchain
from kogc.verify import GateFailed, GateResult, Progress, Reference, run_gate


def write_artifact(
    path: Path,
    model: ModelInput,
    built: Built,
    target: Target,
    key: str,
    weights: bool,
    reference: tuple[str, Reference] | None,
    tell: Progress,
) -> GateResult | None:
    """Write the artifact of ``built`` to ``path``; the file appears there only when everything, gate included, is done.

    ``reference``: (name, logits) to hold the kernel against, None for no gate. Returns what the gate found.
    Raises OutputFailure, PackError; GateFailed when the kernel is off, and then nothing is written.
    """
    toolchain, planned = load_toolchain(target.name), built.planned
    texts = {
        toolchain.SOURCE_MEMBER: planned.rendered.source.encode(),
        toolchain.BINARY_MEMBER: built.binary.read_bytes(),
        PROGRAM: to_json(planned.program).encode(),
        IR: graph_to_json(planned.graph).encode(),
    }
    if model.tokenizer_json is not None:
        texts[TOKENIZER] = model.tokenizer_json.encode()
    packed = sum(_rank_bytes(planned, rank) for rank in range(planned.program.ranks)) if weights else 0
    tables = sum(table.nbytes for table in planned.graph.tables.values())
    with ArtifactWriter(path, packed + tables + sum(map(len, texts.values()))) as writer:
        for name, data in texts.items():
            writer.add(name, data)
        writer.add_tables(planned.graph.tables)
        if weights:
            _pack(writer, model, planned, target, tell)
        writer.seal(_manifest(model, planned, target, built.facts, key, weights))
        return _gate(writer, reference, tell) if reference else None


def _pack(writer: ArtifactWriter, model: ModelInput, planned: Planned, target: Target, tell: Progress) -> None:
    """Fill ``weights/rank-N.bin`` for every rank: its streams; and in the first one embedding tables and constants, and behind
    them the plan, for all."""
    program, plan, layout = planned.program, planned.rendered.plan, target.layout
    weights = ViewedWeights(model.weights, planned.leaves)
    before, total = 0, sum(index.total_bytes for index in planned.indices)
    for rank, schedule in enumerate(rank_schedules(program, planned.schedule)):
        index = planned.indices[rank]
        told = lambda done, _, before=before: tell("packing weights", before + done, total)
        with writer.region(weights_name(rank), _rank_bytes(planned, rank)) as out:
            if rank == 0:
                pack_stream(program, schedule, weights, layout, out[: index.total_bytes], planned.graph.tables, progress=told)
                out[index.total_bytes :] = memoryview(plan)
            else:
                pack_share(program, schedule, weights, layout, out, index, told)
        before += index.total_bytes


def _rank_bytes(planned: Planned, rank: int) -> int:
    return planned.indices[rank].total_bytes + (len(planned.rendered.plan) if rank == 0 else 0)


def _gate(writer: ArtifactWriter, reference: tuple[str, Reference], tell: Progress) -> GateResult:
    """Run the gate on the file that has no name yet, and record the result in it."""
    name, logits = reference
    with writer.preview() as artifact:
        result = run_gate(artifact, logits, name, progress=tell)
    if not result.passed:
        raise GateFailed(f"the kernel fails the accuracy gate: {result.problem}; --no-gate writes the artifact all the same")
    writer.amend(gate=result.to_json())
    return result


def _manifest(model: ModelInput, planned: Planned, target: Target, binary_facts: Mapping[str, Any], key: str, weights: bool) -> Manifest:
    toolchain = load_toolchain(target.name)
    program, rendered = planned.program, planned.rendered
    return Manifest(
        model=model.name,
        target=target.name,
        dtype=program.dtype,
        vocab=program.vocab,
        context=program.capacity,
        workers=planned.schedule.workers // program.ranks,
        tile_rows=planned.schedule.tile_rows,
        step_tokens=program.step_tokens,
        launch_version=LAUNCH_VERSION,
        kv_bytes=rendered.kv_bytes,
        exchange_bytes=rendered.exchange_bytes,
        stages=rendered.stages,
        sections=tuple(_sections(planned, rank) for rank in range(program.ranks)) if weights else (),
        ranks=program.ranks,
        probe_bytes=0,
        model_type=model.config.get("model_type"),
        shapes=_shapes(program.meta),
        bos_id=model.bos_id,
        eos_ids=model.eos_ids,
        chat_template=model.chat_template,
        toolchain=toolchain.toolchain_facts(),
        cpu_features=toolchain.required_features(),
        build_key=key,
        meta={"padding_bytes": _padding_bytes(planned), **binary_facts},
        kogc=__version__,
    )


def _padding_bytes(planned: Planned) -> int:
    """Zeros in the streams of all ranks."""
    return sum(length for index in planned.indices for _, length in index.streams) - weight_bytes(planned.program)


def _sections(planned: Planned, rank: int) -> dict[str, Section]:
    """Where the launch struct's pointers point to in the packed files: a rank's streams in its own, all else in the first."""
    first, plan = planned.indices[0], planned.rendered.plan
    holder = None if rank == 0 else 0
    return {
        "stream": Section(0, planned.indices[rank].embed_offset),
        "embed": Section(first.embed_offset, first.const_offset - first.embed_offset, holder),
        "consts": Section(first.const_offset, first.total_bytes - first.const_offset, holder),
        "plan": Section(first.total_bytes, len(plan), holder),
    }


def _shapes(facts) -> dict[str, int]:
    return {name: value for name, value in facts.items() if isinstance(value, int)}
