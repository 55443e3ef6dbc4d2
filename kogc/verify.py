"""The accuracy gate: an artifact's kernel held against a reference, over the artifact's own rounded weights."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kogc.artifact import Artifact
from kogc.errors import BadInput, KogcError
from kogc.gate_numbers import LIMITS, closeness, next_tokens
from kogc.gate_stages import StageCheck, check_stages
from kogc.ir.graph import Graph
from kogc.ir.interpret import run_sequence
from kogc.ir.passes.views import source_key
from kogc.packed import packed_weights
from kogc.runtime.device import device_id

#: Positions of the gate's text: half of them seeded random ids, half what the model makes of them.
POSITIONS = 48
RUNS = 3
_SEED = 20240

#: ``progress(what, done, total)``.
Progress = Callable[[str, float, float], None]
#: ``ids → logits``, fp32 or fp64 [T, vocab], teacher-forced from position 0.
Reference = Callable[[Sequence[int]], np.ndarray]


class GateFailed(KogcError):
    """A kernel whose logits are further from the reference than its dtype allows."""


@dataclass(frozen=True)
class GateResult:
    """What the gate found. ``problem`` is the first thing that is wrong, ``None`` when it ``passed``.

    ``reference`` names what the logits were held against. ``rel_rmse`` and ``cosine`` are over all positions,
    ``worst_rel_rmse`` is the worst single position's. ``argmax_checked`` positions had a clear margin, ``argmax_wrong`` of
    them chose another token. ``runs`` teacher-forced runs were compared bit by bit. ``stages`` are empty unless stages were
    probed. ``machine`` is where it ran: results hold there only.
    """

    passed: bool
    problem: str | None
    reference: str
    dtype: str
    limit: float
    positions: int
    rel_rmse: float
    worst_rel_rmse: float
    cosine: float
    argmax_checked: int
    argmax_wrong: int
    runs: int
    stages: tuple[StageCheck, ...]
    first_bad_stage: str | None
    machine: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """As JSON values; numbers that are not finite become null."""
        return _plain(dataclasses.asdict(self))


def verify_artifact(
    artifact: Artifact,
    model: Any = None,
    *,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> GateResult:
    """`kogc verify`: the gate for logits and for every stage; a pass is remembered for this file on this machine.

    Args:
        artifact: an open artifact with weights.
        model: what it was compiled from, as ``kogc.frontend.load_model`` takes it: the reference is then PyTorch. Without
            it the reference is the artifact's own IR, interpreted over its own weights.
        allow_pickle: accept a pickled model.
        trust_remote_code: run the model code that a Hugging Face folder brings along.
        progress: called with what is being done.

    Raises:
        BadInput: ``model`` cannot be read, or is another one than the artifact's.
        KernelStalled, NumericError: the kernel did not finish.
    """
    from kogc.speed import remember_gate

    allowed = {"allow_pickle": allow_pickle, "trust_remote_code": trust_remote_code}
    reference, name = (packed_reference(artifact), INTERPRETED) if model is None else (_model_reference(artifact, model, allowed), PYTORCH)
    result = run_gate(artifact, reference, name, stages=True, progress=progress)
    if model is not None and not result.passed and result.first_bad_stage is None and result.stages:
        hint = "every stage is right for the artifact's own weights, so the model given is probably not what it was compiled from"
        return dataclasses.replace(result, problem=f"{result.problem}; {hint}")  # and says nothing about the artifact
    remember_gate(artifact, result.to_json())
    return result


PYTORCH = "PyTorch in fp32"
INTERPRETED = "the artifact's own IR, interpreted"


def run_gate(
    artifact: Artifact,
    reference: Reference,
    reference_name: str,
    *,
    stages: bool = False,
    progress: Progress | None = None,
) -> GateResult:
    """Hold ``artifact`` against ``reference``. Stages are probed when asked for, and when the logits are off.

    The probe is a second build of the artifact's source, so it needs a C++ compiler.
    """
    began = time.monotonic()
    tell = progress or (lambda what, done, total: None)
    tell("gate: running the kernel", 0, 0)
    with artifact.engine() as engine:
        ids = gate_ids(engine, artifact.manifest.vocab, artifact.manifest.context)
        runs = [engine.logits(ids) for _ in range(RUNS)]
    tell(f"gate: running {reference_name}", 0, 0)
    expected = reference(ids)
    result = judge(runs, expected, artifact.manifest.dtype, reference_name)
    if stages or not result.passed:
        tell("gate: probing the stages", 0, 0)
        result = with_stages(result, check_stages(artifact, ids, result.limit))
    return dataclasses.replace(result, machine=device_id(artifact.manifest.target), seconds=time.monotonic() - began)


def gate_ids(engine: Any, vocab: int, context: int) -> list[int]:
    """``POSITIONS`` token ids (fewer where the context is shorter): seeded ones, then the model's own continuation.

    Random ids reach everything the vocabulary holds; the model's own text is where its margins are clear.
    """
    length = min(POSITIONS, context)
    random = np.random.default_rng(_SEED).integers(0, vocab, length).tolist()
    start = random[: max(1, length // 2)]
    with engine.generate(start, max_tokens=length) as generation:
        own = [token.id for token in generation]
    return (start + own + random)[:length]


def judge(runs: Sequence[np.ndarray], expected: np.ndarray, dtype: str, reference_name: str) -> GateResult:
    """The verdict on the logits [T, vocab] of several equal runs. Where they ran and for how long is the caller's to add."""
    limit, logits = LIMITS[dtype], runs[0]
    close = closeness(logits, expected)
    worst = max(closeness(row, wanted).rel_rmse for row, wanted in zip(logits, expected, strict=True))
    tokens = next_tokens(logits, expected, limit)
    equal = all(np.array_equal(logits.view(np.uint32), run.view(np.uint32)) for run in runs[1:])
    problem = None
    if not equal:
        problem = f"{len(runs)} runs over the same tokens gave different logits"
    elif not close.within(limit):
        problem = f"relative RMSE of the logits is {close.rel_rmse:.2e}, the limit for {dtype} is {limit:.0e} (against {reference_name})"
    elif tokens.wrong:
        problem = f"another next token at position {tokens.wrong[0]} although the reference's margin is clear (against {reference_name})"
    return GateResult(
        passed=problem is None,
        problem=problem,
        reference=reference_name,
        dtype=dtype,
        limit=limit,
        positions=len(expected),
        rel_rmse=close.rel_rmse,
        worst_rel_rmse=worst,
        cosine=close.cosine,
        argmax_checked=tokens.checked,
        argmax_wrong=len(tokens.wrong),
        runs=len(runs),
        stages=(),
        first_bad_stage=None,
        machine="",
        seconds=0.0,
    )


def with_stages(result: GateResult, stages: Sequence[StageCheck]) -> GateResult:
    """``result`` with what the probe found; the first stage that is off is the problem to look at."""
    bad = _first_off(stages)
    problem = result.problem
    if bad:
        found = f"stage {bad.stage} is the first that is off (relative RMSE {bad.rel_rmse:.2e} of {result.limit:.0e}, iteration {bad.iteration})"
        problem = f"{problem}; {found}" if problem else found
    return dataclasses.replace(
        result, passed=problem is None, problem=problem, stages=tuple(stages), first_bad_stage=bad.stage if bad else None
    )


def _first_off(stages: Sequence[StageCheck]) -> StageCheck | None:
    """The stage where the error began: in a loop, an earlier iteration comes before every stage of a later one."""
    loops = list(dict.fromkeys(check.segment for check in stages))
    off = [check for check in stages if not check.passed]
    return min(off, key=lambda check: (loops.index(check.segment), check.iteration), default=None)


# ── references ──


def packed_reference(artifact: Artifact) -> Reference:
    """The artifact's decode graph interpreted over the weights unpacked from its own pack."""
    weights = packed_weights(artifact)
    return lambda ids: run_sequence(artifact.ir, ids, weights)


def model_reference(model: Any, graph: Graph, dtype: str) -> Reference:
    """``model``'s module in fp32 with those weights rounded to ``dtype`` that the artifact rounds. Built when first used."""
    from kogc import reference  # torch is imported here and not by whoever only reads results

    get = reference.rounded(model.weights, reference.matrix_keys(graph), dtype)
    return lambda ids: reference.module_logits(reference.fp32_module(model, get), ids)


def _model_reference(artifact: Artifact, source: Any, allowed: dict[str, bool]) -> Reference:
    from kogc.frontend.load import load_model

    seeded = isinstance(source, str) and source.startswith("preset:")
    source = Path(source) if isinstance(source, str) and not seeded else source
    facts = artifact.manifest
    chosen = facts.context if isinstance(source, Path) and source.suffix.lower() == ".onnx" else None  # caches that grow have no length of their own
    whole = load_model(source, **allowed, random_weights=seeded, max_context=chosen)
    other = f"{source if isinstance(source, str | Path) else whole.name} is not what {artifact.path} was compiled from"
    if whole.context is not None and whole.context < facts.context:
        raise BadInput(f"{other}: it has {whole.context} positions, the artifact {facts.context}")
    if whole.config.get("vocab_size", facts.vocab) != facts.vocab:
        raise BadInput(f"{other}: its vocabulary has {whole.config['vocab_size']} tokens, the artifact's {facts.vocab}")
    model = load_model(source, **allowed, random_weights=seeded, max_context=facts.context) if whole.config else whole
    keys = {source_key(node) for node in artifact.ir if node.op == "weight"}
    missing = sorted(keys - set(model.weights.keys()))
    if missing:
        raise BadInput(f"{other}: it has no weight {missing[0]}")
    return model_reference(model, artifact.ir, artifact.manifest.dtype)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
