"""The compiler: from a model to one artifact, pass by pass."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kogc.artifact import Artifact
from kogc.build_key import build_key, unchanged
from kogc.cache import cache_folder
from kogc.compile_build import build_plan
from kogc.compile_passes import Planned, plan
from kogc.compile_write import write_artifact
from kogc.dump import Dump
from kogc.errors import BadInput
from kogc.frontend.load import load_model
from kogc.frontend.model_input import ModelInput
from kogc.frontend.sources import MissingWeights
from kogc.ir.passes.across_ranks import MOST_RANKS
from kogc.ir.passes.spans import PlanError
from kogc.machine import memory_bytes, usable_cores
from kogc.output import check_output
from kogc.runtime.device import why_no_device
from kogc.targets import Target, load_target, target_names
from kogc.verify import PYTORCH, GateResult, Progress, model_reference

if TYPE_CHECKING:
    from torch import nn

#: Models with made-up weights are for measuring speed; past this many bytes of weights the gate's reference would take
#: longer and more memory than the compile.
RANDOM_GATE_BYTES = 1 << 30

#: Plans grow with the square of the workers.
MAX_WORKERS = 1024


@dataclass(frozen=True)
class Compiled:
    """What a compile led to. ``cached``: the artifact was there already and is up to date. ``gate`` is what the accuracy
    gate found (a manifest's values when cached), ``None`` with the reason in ``gate_note`` when it did not run."""

    artifact: Artifact
    cached: bool
    seconds: float
    gate: GateResult | Mapping[str, Any] | None
    gate_note: str | None = None

    def to_json(self) -> dict[str, Any]:
        """What ``kogc compile --json`` prints, the gate aside."""
        manifest = self.artifact.manifest
        return {
            "artifact": str(self.artifact.path),
            "model": manifest.model,
            "target": manifest.target,
            "dtype": manifest.dtype,
            "context": manifest.context,
            "workers": manifest.workers,
            "ranks": manifest.ranks,
            "cached": self.cached,
            "seconds": round(self.seconds, 3),
            "gate_note": self.gate_note,
        }


def compile(
    model_or_path: str | Path | nn.Module,
    target: str = "cpu",
    *,
    output: str | Path | None = None,
    dtype: str | None = None,
    max_context: int | None = None,
    workers: int | None = None,
    tp: int = 1,
    dump_ir: str | Path | None = None,
    random_weights: bool = False,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    tokenizer: str | Path | None = None,
    weights: bool = True,
    gate: bool = True,
    progress: Progress | None = None,
) -> Artifact:
    """Compile a model into an artifact and open it. ``compile_model`` tells more about how it went.

    Args:
        model_or_path: a live module ``forward(token int64[T], position int64[T]) → logits [T, V]`` whose KV caches are
            buffers, or a .pt, .pt2, .onnx or .gguf file, a Hugging Face folder, or ``preset:NAME``.
        target: what to compile for, one of ``kogc targets``.
        output: the file to write; by default one in the cache folder.
        dtype: ``fp32``, ``fp16`` or ``bf16`` for weights and KV cache; by default the model's own.
        max_context: positions the KV cache holds; by default all the model has.
        workers: how many on each rank, baked in; by default what target.toml says, or one thread per usable core in all.
        tp: tensor parallelism, the number of ranks the model is cut over, baked in.
        dump_ir: folder for the result of every pass.
        random_weights: make a preset's weights up, seeded.
        allow_pickle: unpickle a whole module, which runs code from the file.
        trust_remote_code: run the model code that a Hugging Face folder brings along.
        tokenizer: a tokenizer.json to put into the artifact.
        weights: False compiles the code only.
        gate: hold the kernel against PyTorch before the file gets its name.
        progress: called with what is being done, how much of it is done, and of how much.

    Raises:
        BadInput, FrontendError, GraphError: the model or an option cannot be used.
        OutputFailure, ToolchainError, EnvironmentFailure: disk, compiler or machine do not play along.
        GateFailed: the kernel's logits are off; nothing is written.
    """
    options = dict(locals())
    return compile_model(options.pop("model_or_path"), options.pop("target"), **options).artifact


def compile_model(
    model_or_path: str | Path | nn.Module,
    target: str = "cpu",
    *,
    output: str | Path | None = None,
    dtype: str | None = None,
    max_context: int | None = None,
    workers: int | None = None,
    tp: int = 1,
    dump_ir: str | Path | None = None,
    random_weights: bool = False,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    tokenizer: str | Path | None = None,
    weights: bool = True,
    gate: bool = True,
    progress: Progress | None = None,
) -> Compiled:
    """As ``compile``, with what happened on the way. An up-to-date ``output`` is opened and nothing is done."""
    began = time.monotonic()
    tell = progress or (lambda step, done, total: None)
    machine = _target(target)
    _check_ranks(tp, machine)
    threads = machine.facts.get("workers", max(1, usable_cores() // tp)) if workers is None else workers
    most = machine.facts.get("multiprocessors", MAX_WORKERS // tp)
    if not isinstance(threads, int) or not 1 <= threads <= most:
        has = f" (an {machine.title} has {most} multiprocessors)" if "multiprocessors" in machine.facts else f" on each of {tp} ranks" if tp > 1 else ""
        raise BadInput(f"workers is {threads!r}, expected an integer from 1 to {most}{has}")
    if max_context is not None and (not isinstance(max_context, int) or max_context < 2):
        raise BadInput(f"max_context is {max_context!r}, expected an integer of at least 2")
    tell("reading the model", 0, 0)
    model = load_model(
        model_or_path, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code, tokenizer=tokenizer,
        random_weights=random_weights, max_context=max_context,
    )  # fmt: skip
    storage = _storage_dtype(dtype or model.dtype)
    if weights and isinstance(model.weights, MissingWeights):
        raise BadInput(model.weights.problem)
    key = build_key(model, machine, storage, threads, tp, weights)
    path = Path(output) if output is not None else cache_folder("artifacts") / f"{key}.kog"
    check_output(path, model_or_path)
    note = _why_no_gate(model, target, weights, gate, random_weights)
    known = unchanged(path, key, needs_gate=note is None)
    if known and dump_ir is None:
        return Compiled(known, True, time.monotonic() - began, known.manifest.gate, note)
    planned = _plan(model, storage, threads, workers is not None, tp, machine, dump_ir, tell)
    reference = None if note else (PYTORCH, model_reference(model, planned.graph, storage))
    result = write_artifact(path, model, build_plan(planned, machine, tell), machine, key, weights, reference, tell)
    return Compiled(Artifact(path, intact=True), False, time.monotonic() - began, result, note)


def _plan(
    model: ModelInput, dtype: str, workers: int, chosen: bool, ranks: int, machine: Target, dump_ir: str | Path | None, tell: Progress
) -> Planned:
    """``plan``. A model without a safe plan for ``workers`` gets fewer of them, unless the user has ``chosen`` the number."""
    while True:
        try:
            return plan(model, dtype, workers, machine, Dump(dump_ir), tell, ranks)
        except PlanError as error:
            if chosen:
                raise BadInput(f"there is no safe plan for {model.name} on {workers} workers; try fewer with --workers ({error})") from error
            if workers == 1:
                raise
            workers //= 2


def _target(name: str) -> Target:
    if name not in target_names():
        raise BadInput(f"there is no target {name!r}; known: {', '.join(target_names())} (see `kogc targets`)")
    return load_target(name)


def _check_ranks(tp: int, machine: Target) -> None:
    if not isinstance(tp, int) or not 1 <= tp <= MOST_RANKS:
        raise BadInput(f"tp is {tp!r}, expected an integer from 1 to {MOST_RANKS}")
    if tp > 1 and machine.ranks_machine is None:
        raise BadInput(f"tp is {tp}, but kernels for {machine.name} run on one rank so far")


def _storage_dtype(name: str) -> str:
    if name == "fp64":
        return "fp32"
    if name not in ("fp32", "fp16", "bf16"):
        raise BadInput(f"dtype is {name!r}, expected fp32, fp16 or bf16")
    return name


def _why_no_gate(model: ModelInput, target: str, weights: bool, gate: bool, random_weights: bool) -> str | None:
    """Why the accuracy gate does not run, or None."""
    if not gate:
        return "switched off"
    if not weights:
        return "compiled without weights"
    obstacle = why_no_device(target)
    if obstacle:
        return f"{obstacle}; run `kogc verify` where the kernel can run"
    elements = sum(parameter.numel() for parameter in model.module.parameters())
    if random_weights and 2 * elements > RANDOM_GATE_BYTES:
        return f"random weights of {2 * elements / 1e9:.1f} GB are for speed work; run `kogc verify` for the gate"
    needed, available = 4 * elements, memory_bytes()[1]
    if available and needed > 0.8 * available:
        return f"the fp32 reference needs {needed / 1e9:.1f} GB and {available / 1e9:.1f} GB are free; run `kogc verify` elsewhere"
    return None


__all__ = ["Compiled", "GateResult", "Planned", "Progress", "compile", "compile_model"]
