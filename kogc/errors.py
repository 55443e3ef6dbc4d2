"""What can go wrong, as one family of exceptions: every message is one line that says what, where and what to do.

The command line prints the message and leaves with ``exit_code``. Errors of the frontend and of the IR are plain
``ValueError``s elsewhere (they know nothing of this package); the command line treats those as bad input, too.
"""

from __future__ import annotations


class KogcError(Exception):
    """Base of everything kogc raises on purpose. ``str(error)`` is one line."""

    #: Exit code of the command line: 2 bad input, 1 environment (disk, GPU, toolchain) or a failed run.
    exit_code = 1


class BadInput(KogcError, ValueError):
    """The caller handed in something that cannot be used: a file, a token id, an option."""

    exit_code = 2


class ArtifactError(BadInput):
    """A file that is not a usable artifact: damaged, truncated, of a newer schema, not a ``.kog`` at all."""


class ContextOverflow(BadInput):
    """More tokens than the artifact's context holds.

    ``position``: context tokens already in use; ``tokens``: tokens that were to be added; ``context``: the limit.
    """

    def __init__(self, position: int, tokens: int, context: int) -> None:
        self.position, self.tokens, self.context = position, tokens, context
        used = f" after the {position} already in the session" if position else ""
        super().__init__(
            f"{tokens} tokens{used} do not fit into the context of {context}; "
            "shorten the prompt or compile with a larger --max-context"
        )


class EnvironmentFailure(KogcError):
    """The machine does not play along: disk full or read-only, no compiler, a GPU or CPU that does not fit."""


class OutputFailure(EnvironmentFailure):
    """A result could not be written: folder missing, read-only or full."""


class ToolchainError(EnvironmentFailure):
    """No working compiler, or the compiler refused the source."""


class PlanRejected(ToolchainError):
    """A kernel that must not be used: its plan asks too much of a worker's memory, or it spills registers. Another plan may do."""


class MachineMismatch(EnvironmentFailure):
    """The artifact's binary was built for another machine and cannot run on this one."""


class KernelStalled(EnvironmentFailure):
    """A worker waited longer than allowed for a value; everybody left the kernel.

    ``stage``: name of the stage that waited; ``iteration``: of its segment; ``worker`` waited for ``peer`` (``None``: for any
    of several), for write ``expected``, and last saw ``seen``; ``step``: step of the launch. ``rank`` and ``peer_rank``: theirs,
    where there are several. Fields are ``None`` when the kernel could not tell.
    """

    def __init__(
        self,
        stage: str | None,
        iteration: int | None = None,
        worker: int | None = None,
        peer: int | None = None,
        expected: int | None = None,
        seen: int | None = None,
        step: int | None = None,
        waited_s: float | None = None,
        rank: int | None = None,
        peer_rank: int | None = None,
    ) -> None:
        self.stage, self.iteration, self.worker, self.peer = stage, iteration, worker, peer
        self.rank, self.peer_rank = rank, peer_rank
        self.expected, self.seen, self.step, self.waited_s = expected, seen, step, waited_s
        if stage is None:
            super().__init__("the kernel left without a result and without saying why; run `kogc verify` on the artifact")
            return
        limit = f" for {waited_s:g} s" if waited_s is not None else ""
        other = "another" if peer is None else _named(peer, peer_rank)
        found = f", expecting write {expected} and seeing {seen}" if expected is not None else ""
        super().__init__(
            f"stage {stage} (iteration {iteration}, step {step}): {_named(worker, rank)} waited{limit} for {other}{found}; "
            "if the machine was merely busy, raise stall_timeout"
        )


def _named(worker: int | None, rank: int | None) -> str:
    return f"worker {worker}" if rank is None else f"worker {worker} of rank {rank}"


class WorkersMissing(KernelStalled):
    """Not all workers of the kernel got a place on the machine in time, so none of them began.

    ``worker`` waited for ``waited_s`` seconds.
    """

    def __init__(self, worker: int, waited_s: float, crowded: str) -> None:
        self.stage, self.iteration, self.step = "check-in", None, None
        self.worker, self.peer, self.expected, self.seen, self.waited_s = worker, None, None, None, waited_s
        self.rank = self.peer_rank = None
        EnvironmentFailure.__init__(self, f"the kernel could not start: not all of its workers came to run within {waited_s:g} s; {crowded}")


class NumericError(KogcError):
    """The logits of a position held a NaN, so there is no next token.

    ``position``: context position; ``step``: step of the launch; ``stage``: name of the stage that found it.
    """

    def __init__(self, position: int, step: int | None, stage: str | None) -> None:
        self.position, self.step, self.stage = position, step, stage
        super().__init__(
            f"the logits at position {position} (step {step}) hold a NaN, found by stage {stage}; "
            "`kogc verify` names the first stage that is off"
        )
