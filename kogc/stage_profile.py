"""Where the time of a token goes: how long every stage waits for values and how long it works, measured inside the kernel.

A profile build keeps, for every worker and stage, the clock when the stage began and when all it waits for was there. What
lies between is waiting; from there to the next stage's begin is work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kogc.artifact import Artifact
from kogc.codegen.layout import numbered_stages, stage_places
from kogc.errors import BadInput
from kogc.ir.program import Program


@dataclass(frozen=True)
class StageTime:
    """One stage over a token; times are means over the workers and the ``count`` iterations, in µs.

    ``slowest`` is the worker that works longest in this stage, ``slowest_us`` its mean.
    """

    stage: str
    segment: str
    kind: str
    count: int
    wait_us: float
    work_us: float
    slowest_us: float
    slowest: int

    @property
    def wait_token_us(self) -> float:
        """Waiting of all iterations."""
        return self.count * self.wait_us

    @property
    def work_token_us(self) -> float:
        """Work of all iterations."""
        return self.count * self.work_us


@dataclass(frozen=True)
class StageProfile:
    """A token of ``model`` at context ``position``: ``stages`` in execution order. ``step_us`` is a token of this build,
    whose clock reads cost a little; ``clock_ghz`` the processor's clock meanwhile."""

    model: str
    target: str
    dtype: str
    workers: int
    position: int
    step_us: float
    clock_ghz: float
    stages: tuple[StageTime, ...]

    @property
    def wait_us(self) -> float:
        """All waiting of a token, the mean over workers."""
        return sum(stage.wait_token_us for stage in self.stages)


def profile_stages(artifact: Artifact, prompt: Sequence[int], tokens: int) -> StageProfile:
    """Let a profile build continue ``prompt`` by ``tokens`` tokens; what is returned tells of the last one.

    Raises BadInput for a target without profile builds, and when the model stops before a speed is known; ToolchainError
    where no compiler works; and as ``Engine.generate``.
    """
    with artifact.engine(profile=True) as engine:
        generation = engine.generate(prompt, max_tokens=tokens)
        for _ in generation:
            pass
        stamps = engine.stamps()
    if generation.stats.decode_tok_s is None:
        raise BadInput(f"{generation.stats.tokens} token is too few to profile; ask for more, or for another prompt")
    program, position = artifact.program, len(prompt) + len(generation.ids) - 1
    step_us = 1e6 / generation.stats.decode_tok_s
    stages, clock_ghz = stage_times(program, stamps, step_us)
    manifest = artifact.manifest
    return StageProfile(program.model, manifest.target, program.dtype, manifest.workers, position, step_us, clock_ghz, stages)


def stage_times(program: Program, stamps: np.ndarray, step_us: float) -> tuple[tuple[StageTime, ...], float]:
    """What ``stamps`` (``Engine.stamps``) of a step of ``step_us`` say about the stages of ``program``, and the clock in GHz.

    The clock follows from the step's length: from its first stamp to its last a worker counts as many cycles as the step
    takes, but for the moment after the last one, in which the host is told the token.
    """
    waits, works = _intervals(stamps)
    cycles_per_us = float((waits + works).sum(1).mean()) / step_us
    numbers = {place: number for number, place in enumerate(stage_places(program))}
    owner = np.array([numbers[segment, index] for segment, _, index, _ in program.instances()])
    times = tuple(
        _stage_time(program, segment, stage, waits[:, owner == number] / cycles_per_us, works[:, owner == number] / cycles_per_us)
        for number, segment, stage in numbered_stages(program)
    )
    return times, cycles_per_us * 1e-3


def _intervals(stamps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cycles [workers, instances] of waiting and of work. The last instance's work ends unseen and counts as none."""
    begin = stamps[:, :, 0]
    there = np.maximum(stamps[:, :, 1], begin)  # 0 where nothing is waited for
    end = np.concatenate([begin[:, 1:], there[:, -1:]], axis=1)
    return there - begin, end - there


def _stage_time(program: Program, segment: int, stage, waits: np.ndarray, works: np.ndarray) -> StageTime:
    """``waits`` and ``works``: µs [workers, iterations]."""
    of_worker = works.mean(1)
    slowest = int(of_worker.argmax())
    return StageTime(
        stage.name, program.segments[segment].name, stage.kind, waits.shape[1],
        float(waits.mean()), float(works.mean()), float(of_worker[slowest]), slowest,
    )  # fmt: skip


_TITLES = ("stage", "times", "waits µs", "works µs", "slowest µs", "worker", "a token µs", "of it waiting")


def table(profile: StageProfile) -> str:
    """The profile as a Markdown table, columns aligned, under a line that says what it is of."""
    rows = [_TITLES, *map(_cells, profile.stages)]
    whole = profile.wait_us + sum(stage.work_token_us for stage in profile.stages)
    rows.append(("all", "", "", "", "", "", f"{whole:.1f}", f"{profile.wait_us / whole:.0%}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_TITLES))]
    lines = ["| " + " | ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths))) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join([heading(profile), "", *lines])


def heading(profile: StageProfile) -> str:
    """What a profile is of, in one line."""
    return (
        f"{profile.model}, {profile.dtype}, position {profile.position}: {profile.step_us:.1f} µs a token with clocks kept, "
        f"{profile.workers} workers at {profile.clock_ghz:.2f} GHz"
    )


def _cells(time: StageTime) -> tuple[str, ...]:
    whole = time.wait_token_us + time.work_token_us
    return (
        time.stage, str(time.count), f"{time.wait_us:.2f}", f"{time.work_us:.2f}", f"{time.slowest_us:.2f}", str(time.slowest),
        f"{whole:.1f}", f"{time.wait_token_us / whole:.0%}" if whole else "",
    )  # fmt: skip
