"""Kernels of one artifact on one engine: built, held against the original bit by bit, and measured in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kogc.artifact import Artifact
from kogc.errors import BadInput
from kogc.runtime.engine import Engine
from kogc.runtime.generation import Generation
from kogc.targets.toolchains import load_toolchain
from kogc.tune_knobs import Values, with_values
from kogc.tune_search import Comparison, ResultsDiffer
from kogc.verify import RUNS, Progress, gate_ids

_SEED = 20241
_CONTEXT, _TOKENS = 1024, 64


@dataclass(frozen=True)
class Load:
    """What is measured: ``runs`` times, a generation of ``tokens`` tokens behind ``context`` others."""

    tokens: int
    context: int
    runs: int


def make_load(artifact: Artifact, tokens: int | None, context: int | None, runs: int) -> Load:
    """The load asked for; by default 64 tokens behind 1024, or as many as the artifact's context holds.

    Raises BadInput for one that does not fit, or from which no median or speed could be had.
    """
    capacity = artifact.manifest.context
    context = max(1, min(_CONTEXT, capacity // 2)) if context is None else context
    # After the last position one more token can be sampled.
    room = capacity - context + 1
    tokens = min(_TOKENS, room) if tokens is None else tokens
    if runs < 3 or runs % 2 == 0:
        raise BadInput(f"runs is {runs}; a median and a spread take an odd number of them, at least 3")
    if not 1 <= context < capacity:
        raise BadInput(f"context is {context}; {artifact.path} has {capacity} positions, so it can be 1 to {capacity - 1}")
    if not 2 <= tokens <= room:
        raise BadInput(f"tokens is {tokens}; behind {context} others, {artifact.path} has room for 2 to {room}")
    return Load(tokens, context, runs)


def build_kernel(artifact: Artifact, values: Values) -> Artifact:
    """``artifact`` with a kernel built here from its own source, knobs set to ``values``; its manifest tells how.

    Raises ToolchainError, PlanRejected.
    """
    toolchain = load_toolchain(artifact.manifest.target)
    source = with_values(artifact.source, values)
    binary = toolchain.build(source)
    return artifact.with_kernel(
        source,
        binary.read_bytes(),
        toolchain=toolchain.toolchain_facts(),
        cpu_features=toolchain.required_features(),
        meta={**artifact.manifest.meta, **toolchain.binary_facts(binary)},
    )


class Bench:
    """Holds kernels of an engine's artifact against each other. The weights are there once; kernels take turns.

    Making one runs the artifact's own kernel: over the gate's ids, and to fill the context in front of what is measured.
    """

    def __init__(self, engine: Engine, load: Load, tell: Progress) -> None:
        self._engine, self._load, self._tell = engine, load, tell
        manifest = engine.artifact.manifest
        tell("running the original kernel", 0, 0)
        self._ids = gate_ids(engine, manifest.vocab, manifest.context)
        self._logits = engine.logits(self._ids)
        self._prompt: list[int] = np.random.default_rng(_SEED).integers(0, manifest.vocab, load.context).tolist()
        self._session = engine.session()
        self._generate(self._prompt, 1)
        self._tokens = self._run(engine.artifact).ids

    def check(self, kernel: Artifact) -> None:
        """Raises ResultsDiffer unless logits over the gate's ids and tokens of the load are the original's, bit by bit."""
        self._engine.use_kernel(kernel)
        for _ in range(RUNS):
            wrong = np.flatnonzero((self._engine.logits(self._ids).view(np.uint32) != self._logits.view(np.uint32)).any(axis=1))
            if wrong.size:
                raise ResultsDiffer(f"its logits at position {wrong[0]} are not those of the original kernel")
        if self._run(kernel).ids != self._tokens:
            raise ResultsDiffer(f"its tokens behind a context of {self._load.context} are not those of the original kernel")

    def compare(self, base: Artifact, candidate: Artifact, what: str) -> Comparison:
        """Speeds of two kernels in turns, so that a machine that slows down or warms up does so for both."""
        speeds: tuple[list[float], list[float]] = [], []
        for run in range(self._load.runs):
            self._tell(f"measuring {what}", run, self._load.runs)
            for which in (0, 1) if run % 2 == 0 else (1, 0):
                speeds[which].append(self._run((base, candidate)[which]).stats.decode_tok_s)
        return Comparison(tuple(speeds[0]), tuple(speeds[1]))

    def _run(self, kernel: Artifact) -> Generation:
        """The load, once, on ``kernel``. The context in front of the last id of the prompt is filled already."""
        self._engine.use_kernel(kernel)
        self._session.rewind(self._load.context - 1)
        return self._generate(self._prompt[-1:], self._load.tokens)

    def _generate(self, prompt: Sequence[int], tokens: int) -> Generation:
        with self._engine.generate(prompt, tokens, session=self._session, ignore_eos=True) as generation:
            for _ in generation:
                pass
        return generation
