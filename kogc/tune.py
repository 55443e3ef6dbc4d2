"""``kogc tune``: measure the knobs of an artifact's target on this machine, and store the best in the artifact."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kogc.artifact import Artifact
from kogc.artifact_copy import copy_members
from kogc.artifact_writer import ArtifactWriter
from kogc.errors import BadInput, EnvironmentFailure
from kogc.output import check_output
from kogc.runtime.device import device_id, why_no_device
from kogc.speed import ceiling_share, passed_gate
from kogc.targets.toolchains import load_toolchain
from kogc.tune_bench import Bench, Load, build_kernel, make_load
from kogc.tune_knobs import Values, knobs_of, values_in
from kogc.tune_search import Comparison, Found, Trial, descend
from kogc.verify import Progress


@dataclass(frozen=True)
class Tuned:
    """What tuning led to.

    ``artifact``: the tuned one where something was faster (``written``), else the one given. ``tuned``: knobs with other
    values than before. ``final``: the tuned kernel held against the original, None when nothing was better on the way.
    ``gate``: what entitles to these speeds; ``ceiling_share``: bytes per second of ``tok_s`` as a fraction of plain reading's.
    """

    artifact: Artifact
    written: bool
    start: Values
    tuned: Values
    trials: tuple[Trial, ...]
    final: Comparison | None
    load: Load
    gate: Mapping[str, Any]
    ceiling_share: float | None

    @property
    def tok_s(self) -> float | None:
        """Of the artifact as it is now; None when no candidate could be measured."""
        if self.final:
            return self.final.tok_s if self.written else self.final.base_tok_s
        # The last figure is the one closest in time to the read ceiling beside it.
        return next((trial.comparison.base_tok_s for trial in reversed(self.trials) if trial.comparison), None)

    def to_json(self) -> dict[str, Any]:
        """What ``kogc tune --json`` prints."""
        return {
            "artifact": str(self.artifact.path), "written": self.written, "start": dict(self.start), "tuned": dict(self.tuned),
            "tok_s": self.tok_s, "ceiling_share": self.ceiling_share, "final": self.final.to_json() if self.final else None,
            "trials": [trial.to_json() for trial in self.trials], **dataclasses.asdict(self.load), "gate": dict(self.gate),
        }  # fmt: skip


def tune(
    artifact: Artifact,
    output: str | Path | None = None,
    *,
    tokens: int | None = None,
    context: int | None = None,
    runs: int = 3,
    progress: Progress | None = None,
) -> Tuned:
    """Try the values in the target's ``[tune]`` on this machine, and write ``artifact`` again with the best of them.

    Every candidate is built from the artifact's own source, must have the original's logits bit by bit, and is kept when it
    is faster by more than the runs' spread. Where none is, no file is touched.

    Args:
        artifact: an open artifact with weights, whose accuracy gate has passed on this machine.
        output: the file to write; by default the artifact's own, which stays as it was until the new one is complete.
        tokens: generated in a run; by default 64.
        context: positions in front of them; by default 1024, or half of what the artifact has.
        runs: of either kernel in a comparison, an odd number of at least 3.
        progress: called with what is being done, how much of it is done, and of how much.

    Raises:
        BadInput: no weights, no knobs, no passed gate, or options that do not fit.
        OutputFailure, ToolchainError, EnvironmentFailure: disk, compiler or machine do not play along; no device to run it on.
    """
    tell = progress or (lambda what, done, total: None)
    path = Path(output) if output is not None else artifact.path
    knobs = knobs_of(artifact)
    gate = _entitled(artifact)
    start = values_in(artifact, knobs)
    load = make_load(artifact, tokens, context, runs)
    load_toolchain(artifact.manifest.target).toolchain_facts()  # no compiler is not a fault of the candidates
    check_output(path)
    # Opened before anything is measured: a disk that is full shows now, and not after minutes.
    with ArtifactWriter(path, sum(artifact.members.values())) as writer:
        found, best = _search(artifact, knobs, start, load, tell)
        if found.better:
            _write(writer, best, start, found, load, gate, tell)
    written = Artifact(path, intact=True) if found.better else artifact
    result = Tuned(written, found.better, start, _changed(start, found), found.trials, found.final, load, gate, None)
    share = ceiling_share(written, result.tok_s, load.context + load.tokens // 2) if result.tok_s else None
    return dataclasses.replace(result, ceiling_share=share)


def _entitled(artifact: Artifact) -> Mapping[str, Any]:
    """The gate that passed for ``artifact`` on this machine. Raises BadInput where there is none, EnvironmentFailure where there can
    be none."""
    artifact.weights()  # raises when there are none
    obstacle = why_no_device(artifact.manifest.target)
    if obstacle:
        raise EnvironmentFailure(f"{artifact.path} is for target {artifact.manifest.target} and cannot be measured on this machine: {obstacle}")
    gate = passed_gate(artifact)
    if gate is None:
        raise BadInput(f"no accuracy gate of {artifact.path} has passed on this machine; run `kogc verify {artifact.path}` first")
    return gate


def _search(
    artifact: Artifact, knobs: Mapping[str, tuple[int, ...]], start: Values, load: Load, tell: Progress
) -> tuple[Found, Artifact]:
    """What was found, and ``artifact`` with the very kernel that was measured to be the best."""
    kernels = {tuple(start.values()): artifact}

    def kernel(values: Values) -> Artifact:
        key = tuple(values.values())
        if key not in kernels:
            kernels[key] = build_kernel(artifact, values)
        return kernels[key]

    with artifact.engine(progress=tell) as engine:
        bench = Bench(engine, load, tell)

        def compare(base: Values, candidate: Values) -> Comparison:
            what = ", ".join(f"{name} = {value}" for name, value in candidate.items() if value != base[name])
            tell(f"building the kernel with {what}", 0, 0)
            other = kernel(candidate)
            tell(f"checking the kernel with {what}", 0, 0)
            bench.check(other)
            return bench.compare(kernel(base), other, what)

        found = descend(knobs, start, compare)
    return found, kernel(found.values)


def _changed(start: Values, found: Found) -> dict[str, int]:
    """The knobs to store."""
    return {name: value for name, value in found.values.items() if value != start[name]} if found.better else {}


def _write(writer: ArtifactWriter, best: Artifact, start: Values, found: Found, load: Load, gate: Mapping[str, Any], tell: Progress) -> None:
    """Fill ``writer`` with ``best``, the artifact with the kernel that was found."""
    assert found.final is not None
    copy_members(best, writer, lambda done, total: tell("writing the artifact", done, total))
    tuning = {"machine": device_id(best.manifest.target), **dataclasses.asdict(load), **found.final.to_json()}
    tuned = {**best.manifest.meta.get("tuned", {}), **_changed(start, found)}
    writer.seal(dataclasses.replace(best.manifest, gate=_carried(gate), meta={**best.manifest.meta, "tuned": tuned, "tuning": tuning}))


def _carried(gate: Mapping[str, Any]) -> dict[str, Any]:
    """The record of ``gate`` for a kernel with bit-identical logits on the same machine. Its stages were not looked at."""
    return {**gate, "stages": [], "carried": "logits bit-identical to those of the kernel that was held against the reference"}
