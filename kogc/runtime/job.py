"""One launch of the kernel, from its struct to its verdict."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kogc.codegen.launch import FINISH_REASONS, LAUNCH_VERSION, MODE_GENERATE, MODE_SAMPLE, MODE_TEACHER_FORCED, Launch, State
from kogc.errors import KernelStalled, NumericError, WorkersMissing
from kogc.runtime.device import Block, Device, Running
from kogc.runtime.sampler_memory import Draw, Logprobs, SamplerMemory


@dataclass(frozen=True)
class Fault:
    """Fault injection: ``kind`` 1 dropped publish, 2 wrong slot, 3 stuck worker, 4 dropped on the way to other ranks, at a
    global stage number and a worker of ``rank``."""

    kind: int
    stage: int
    worker: int
    rank: int = 0


@dataclass(frozen=True)
class Pointers:
    """What is the same for every launch of an engine: device pointers of a rank's weights, tables and exchange buffers.
    ``peers``: where the exchange buffers of all ranks are listed; 0 when there is one."""

    stream: int
    embed: int
    consts: int
    plan: int
    exchange: int
    peers: int = 0


@dataclass(frozen=True)
class Request:
    """What one launch shall do. ``prompt`` goes in from context position ``start`` on; ``kv`` are the caches, a block for
    each rank; ``logits`` (needed when ``teacher_forced``: nothing is generated then) and ``probe`` are device pointers or 0.
    ``draw``: how tokens are drawn; None: greedily."""

    prompt: Sequence[int]
    start: int
    kv: Sequence[Block]
    stall_timeout: float
    max_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    teacher_forced: bool = False
    logits: int = 0
    probe: int = 0
    draw: Draw | None = None


class Job:
    """A launch, its ring and its state; started by the constructor. ``ranks`` are the pointers of each; ``stages`` are names by
    global stage number, ``columns`` the tokens of the largest step, ``workers`` those of a rank; ``left`` is called once, from
    any thread, when the kernel has left."""

    def __init__(
        self,
        device: Device,
        ranks: Sequence[Pointers],
        request: Request,
        fault: Fault | None,
        stages: Sequence[str],
        columns: int,
        workers: int,
        left: Callable[[], None],
    ) -> None:
        self.request, self.stop_ids = request, frozenset(request.stop_ids)
        self._stages, self._columns, self._workers, self._crowded = stages, columns, workers, device.crowded
        self._ranks = len(ranks)
        self._stopping, self._stopped = threading.Lock(), False
        prompt, stop, ring = len(request.prompt), len(request.stop_ids), max(1, request.max_tokens)
        state_bytes = -(-ctypes.sizeof(State) // 64) * 64
        self._memory = device.alloc(state_bytes + 4 * (prompt + stop + ring), "the token ring", host=True)
        words = self._memory.view(np.int32)[state_bytes // 4 :]
        words[:prompt] = request.prompt
        words[prompt : prompt + stop] = request.stop_ids
        self._ring = words[prompt + stop :]
        self.state = State.from_buffer(self._memory.view(np.uint8))
        self._sampler = SamplerMemory(device, request.draw, ring) if request.draw else None
        first = self._memory.address + state_bytes
        texts = (first, first + 4 * prompt, first + 4 * (prompt + stop))
        structs = (self._struct(rank, pointers, fault or Fault(0, -1, -1), *texts) for rank, pointers in enumerate(ranks))
        self._launches = (Launch * self._ranks)(*structs)
        self._running: Running = device.start(self._launches[0], left)

    def tokens(self) -> Iterator[int]:
        """Generated ids as they come, until the kernel leaves."""
        seen, running = 0, True
        while running:
            running = self._running.wait(seen)
            if not running:
                self.stop()  # joined, so that the count read below is the last one
            produced = self.state.produced
            yield from self._ring[seen:produced].tolist()
            seen = produced

    def logprobs(self, index: int) -> Logprobs | None:
        """Log-probabilities beside token ``index``, when they were asked for."""
        return self._sampler.logprobs(index) if self._sampler else None

    def finish(self) -> None:
        """Wait until the kernel leaves by itself, and check how it went. Cancelled when the wait is interrupted."""
        try:
            while self._running.wait(self.state.produced):
                pass
        finally:
            self.stop()
        self.check()

    def stop(self) -> None:
        """Cancel the kernel if it still runs, and return when it has left. Raises EnvironmentFailure when it could not run."""
        with self._stopping:
            if self._stopped:
                return
            self._stopped = True
            if not self.state.finished:
                self._running.cancel()
            self._running.join()

    def __del__(self) -> None:
        # The kernel writes to memory that goes with this object. ``_running`` is missing when it was never started.
        if hasattr(self, "_running"):
            self.stop()

    @property
    def finish_reason(self) -> str:
        """Why the kernel left, in a word; one that left without a word has stalled."""
        reason = FINISH_REASONS.get(self.state.finished, "stalled")
        return "stalled" if reason == "running" and self._stopped else reason

    def check(self) -> None:
        """Raises KernelStalled or NumericError when the kernel, having left, reports one."""
        if self.finish_reason == "stalled":
            raise self._stall()
        if self.finish_reason == "nan":
            position = self.state.nan_position
            raise NumericError(position, self._step_of(position), self._stages[-1] if self._stages else None)

    def _struct(self, rank: int, pointers: Pointers, fault: Fault, prompt: int, stop: int, ring: int) -> Launch:
        request = self.request
        return Launch(
            version=LAUNCH_VERSION,
            mode=MODE_TEACHER_FORCED if request.teacher_forced else MODE_SAMPLE if self._sampler else MODE_GENERATE,
            rank=rank,
            n_prompt=len(request.prompt),
            start_position=request.start,
            max_tokens=request.max_tokens,
            n_stop=len(request.stop_ids),
            fault=fault.kind,
            fault_stage=fault.stage,
            fault_worker=fault.rank * self._workers + fault.worker,
            spin_limit_ns=int(request.stall_timeout * 1e9),
            prompt=prompt,
            stop_ids=stop,
            ring=ring,
            state=self._memory.address,
            stream=pointers.stream,
            embed=pointers.embed,
            consts=pointers.consts,
            plan=pointers.plan,
            kv=request.kv[rank].address,
            exchange=pointers.exchange,
            logits=request.logits,
            probe=request.probe,
            sampling=self._sampler.address if self._sampler else None,
            peers=pointers.peers or None,
        )

    def _stall(self) -> KernelStalled:
        state = self.state
        if not state.abort:
            return KernelStalled(None)
        if not 0 <= state.abort_stage < len(self._stages):
            # Before the first stage, workers wait until all of them are there.
            return WorkersMissing(state.abort_worker, self.request.stall_timeout, self._crowded)
        told = state.abort_expected >= 0
        rank, worker = self._place(state.abort_worker)
        peer_rank, peer = self._place(state.abort_peer)
        return KernelStalled(
            stage=self._stages[state.abort_stage],
            iteration=state.abort_iteration,
            worker=worker,
            peer=peer,
            rank=rank,
            peer_rank=peer_rank,
            expected=state.abort_expected if told else None,
            seen=state.abort_seen if told else None,
            step=state.abort_step,
            waited_s=self.request.stall_timeout,
        )

    def _place(self, worker: int) -> tuple[int | None, int | None]:
        """(rank, worker within it) of a worker as the kernel counts them, through all ranks; no rank where there is one only, and
        neither when the kernel named nobody."""
        if worker < 0:
            return None, None
        return divmod(worker, self._workers) if self._ranks > 1 else (None, worker)

    def _step_of(self, position: int) -> int:
        """The step that computed ``position``: the prompt goes in by ``columns``, then one token a step."""
        index, prompt = position - self.request.start, len(self.request.prompt)
        return index // self._columns if index < prompt else -(-prompt // self._columns) + index - prompt
