"""Decode speed at a context position, between readings of the same bytes; the first token; a soak."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gpu_gate import random_ids
from kogc.artifact import Artifact
from kogc.ceiling import read_rounds
from kogc.runtime.cuda_ceiling import Reader
from kogc.runtime.engine import Engine
from kogc.runtime.session import Session
from kogc.traffic import traffic

#: Rounds of plain reading on each side of a run; the best of both sides together counts.
READS = 5
PROMPT = 32

#: Bytes per second of some rounds of plain reading.
Reads = Callable[[], list[float]]


@dataclass(frozen=True)
class Plan:
    """How much is measured: tokens of a run, runs at a context."""

    tokens: int
    rounds: int


@dataclass(frozen=True)
class Decode:
    """One run in the middle of which the context was ``position`` tokens long. ``ceiling``: bytes per second of the plain
    reads around it."""

    position: int
    us: float
    bytes_per_token: int
    ceiling: float

    @property
    def share(self) -> float:
        """Bytes per second reached, as a fraction of the ceiling."""
        return self.bytes_per_token / (self.us * 1e-6) / self.ceiling


@contextmanager
def plain_reads(artifact: Artifact) -> Iterator[Reads]:
    """A way to read the artifact's stream and do nothing else, on the device that runs it."""
    stream = artifact.section("stream")
    if artifact.manifest.target == "cpu":
        yield lambda: read_rounds(stream, artifact.manifest.workers, READS)
        return
    with Reader(stream) as reader:
        yield lambda: reader.rounds(READS)


def fill(engine: Engine, session: Session, context: int, plan: Plan) -> None:
    """Let ``session`` hold so many random tokens that the runs to come are around ``context``."""
    ids = random_ids(engine.artifact.manifest.vocab, max(1, context - plan.tokens * plan.rounds // 2), seed=5)
    for _ in engine.generate(ids, max_tokens=1, session=session):
        pass


def decode_runs(engine: Engine, session: Session, plan: Plan, reads: Reads) -> list[Decode]:
    """``plan.rounds`` runs of ``plan.tokens`` tokens that continue ``session``."""
    artifact, runs = engine.artifact, []
    stream = artifact.section("stream").nbytes
    for number in range(plan.rounds):
        before = reads()
        first = len(session.ids) + 1
        generation = engine.generate([number + 1], max_tokens=plan.tokens, session=session)
        for _ in generation:
            pass
        position = first + len(generation.ids) // 2
        runs.append(Decode(position, 1e6 / generation.stats.decode_tok_s, stream + traffic(artifact.program, position).kv, max(before + reads())))
    return runs


def median(runs: list[Decode]) -> Decode:
    """The run with the median time."""
    return sorted(runs, key=lambda run: run.us)[len(runs) // 2]


@dataclass(frozen=True)
class FirstToken:
    """µs to the first token beyond the steps that its prompt needs, medians: ``kernel`` from when all workers were there, ``call``
    from the call in Python."""

    kernel: float
    call: float


def first_token(engine: Engine, rounds: int) -> FirstToken:
    """Of prompts of ``PROMPT`` tokens; a step takes what one takes after them. One round more than is counted wakes everything up."""
    columns, found = max(engine.artifact.manifest.step_tokens), []
    for seed in range(rounds + 1):
        generation = engine.generate(random_ids(engine.artifact.manifest.vocab, PROMPT, seed), max_tokens=PROMPT, ignore_eos=True)
        for _ in generation:
            pass
        steps_s = -(-PROMPT // columns) / generation.stats.decode_tok_s
        found.append((1e6 * (generation.stats.prompt_s - steps_s), 1e6 * (generation.stats.ttft_s - steps_s)))
    return FirstToken(*map(statistics.median, zip(*found[1:], strict=True)))


@dataclass(frozen=True)
class Soak:
    """``tokens`` generated in every repeat; the repeats' digests over all tokens and over the last logits' bits."""

    tokens: int
    digests: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return len(set(self.digests)) == 1


def soak(engine: Engine, tokens: int, repeats: int, tell: Callable[[str], None]) -> Soak:
    """Generate at least ``tokens`` tokens, context after context, ``repeats`` times over."""
    digests = []
    for repeat in range(repeats):
        state, made = hashlib.blake2b(digest_size=16), 0
        while made < tokens:
            prompt = random_ids(engine.artifact.manifest.vocab, PROMPT, seed=made)
            ids = [token.id for token in engine.generate(prompt, max_tokens=tokens - made)]
            state.update(repr(ids).encode())
            made += len(ids)
        state.update(engine.logits(prompt).tobytes())
        digests.append(state.hexdigest())
        tell(f"soak: repeat {repeat + 1} of {repeats}, {made} tokens, {digests[-1]}")
    return Soak(made, tuple(digests))
