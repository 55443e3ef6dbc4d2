"""The accuracy gate with its reference on the GPU: the model's module in fp32, holding the artifact's rounded weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from gpu_cases import Case
from kogc.artifact import Artifact
from kogc.frontend.load import load_model
from kogc.reference import fp32_module, matrix_keys, module_logits, rounded_on
from kogc.runtime.engine import Engine
from kogc.runtime.session import Session
from kogc.verify import POSITIONS, PYTORCH, RUNS, GateResult, gate_ids, judge

#: Tokens given to the reference at once where its logits are not wanted.
CHUNK = 512


class Reference:
    """PyTorch's answer. ``module`` is on ``device``, in fp32."""

    def __init__(self, case: Case, artifact: Artifact, device: str) -> None:
        model = load_model(f"preset:{case.preset}", random_weights=True, max_context=case.capacity)
        get = rounded_on(device, model.weights, matrix_keys(artifact.ir), case.dtype)
        self.module = fp32_module(model, get, device)

    def logits(self, ids: Sequence[int], before: Sequence[int] = ()) -> np.ndarray:
        """fp32 [T, vocab]: row t follows ``before`` and ``ids[: t + 1]``."""
        device = next(self.module.parameters()).device
        with torch.inference_mode():
            for start in range(0, len(before), CHUNK):
                part = torch.tensor(before[start : start + CHUNK], device=device)
                self.module(part, torch.arange(start, start + len(part), device=device))
        return module_logits(self.module, ids, len(before))


def gate(engine: Engine, reference: Reference) -> GateResult:
    """The gate as every compile runs it: from an empty context."""
    manifest = engine.artifact.manifest
    ids = gate_ids(engine, manifest.vocab, manifest.context)
    return judge([engine.logits(ids) for _ in range(RUNS)], reference.logits(ids), manifest.dtype, PYTORCH)


def gate_behind(engine: Engine, session: Session, reference: Reference) -> GateResult:
    """The same behind everything in ``session``."""
    manifest = engine.artifact.manifest
    ids = random_ids(manifest.vocab, min(POSITIONS, manifest.context - len(session.ids)), seed=7)
    runs = [engine.logits(ids, session=session) for _ in range(RUNS)]
    return judge(runs, reference.logits(ids, before=session.ids), manifest.dtype, PYTORCH)


def random_ids(vocab: int, count: int, seed: int) -> list[int]:
    """Seeded token ids."""
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()
