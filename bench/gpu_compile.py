"""Compiles the cases side by side in processes of their own, while the GPU measures those that are done."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from compile_child import Steps
from gpu_cases import Case
from kogc.machine import usable_cores

#: A compile is one busy thread, and others while the kernel builds.
CORES_EACH = 3


@dataclass(frozen=True)
class Made:
    """An artifact and the seconds it took, in all and by step."""

    path: Path
    seconds: float
    steps: dict[str, float]


class Compiles:
    """All cases under way, the first ones first. A context manager: its end drops what has not begun."""

    def __init__(self, cases: list[Case], target: str, workers: int | None, folder: Path) -> None:
        at_once = max(1, min(len(cases), usable_cores() // CORES_EACH))
        # Not forked: a child must not inherit the parent's GPU.
        self._pool = ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn"))
        self._made: dict[str, Future[Made]] = {
            case.preset: self._pool.submit(compile_case, case, target, workers, folder / f"{case.preset}.kog") for case in cases
        }

    def result(self, case: Case) -> Made:
        """Wait for the case. Raises what its compile raised."""
        return self._made[case.preset].result()

    def __enter__(self) -> Compiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def compile_case(case: Case, target: str, workers: int | None, path: Path) -> Made:
    """Compile with random weights and without the gate, which the parent runs on the GPU; and build the profile's kernel,
    so that it is in the cache. Raises RuntimeError, which crosses processes whatever it was that went wrong."""
    try:
        return _compiled(case, target, workers, path)
    except Exception as error:
        raise RuntimeError(f"compiling failed: {type(error).__name__}: {error}") from None


def _compiled(case: Case, target: str, workers: int | None, path: Path) -> Made:
    from kogc.compiler import compile_model
    from kogc.targets.toolchains import load_toolchain

    steps = Steps()
    done = compile_model(
        f"preset:{case.preset}", target, output=path, dtype=case.dtype, max_context=case.capacity, workers=workers,
        random_weights=True, gate=False, progress=steps,
    )  # fmt: skip
    steps("building the profile's kernel", 0, 0)
    if "KOGC_PROFILE" in done.artifact.source:
        load_toolchain(target).build(done.artifact.source, ("KOGC_PROFILE",))
    steps("", 0, 0)
    return Made(path, round(sum(steps.seconds.values()), 1), {name: round(seconds, 1) for name, seconds in steps.seconds.items()})
