"""The engine: one artifact on one device, ready to generate."""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kogc.errors import BadInput, ContextOverflow
from kogc.runtime.device import Block, Device, open_device
from kogc.runtime.generation import Generation
from kogc.runtime.job import Fault, Job, Pointers, Request
from kogc.runtime.sampler_memory import Draw
from kogc.runtime.sampling import SamplingParams
from kogc.runtime.session import Session
from kogc.runtime.text import TextStream
from kogc.targets import target_facts

if TYPE_CHECKING:
    from kogc.artifact import Artifact


#: Longer waits than this would not fit the kernel's clock: decades.
_LONGEST_S = 1e9

#: Builds with this macro keep the clock at which every worker began every stage; targets without it cannot be profiled.
_PROFILE = "KOGC_PROFILE"


class Engine:
    """Runs an artifact. A context manager: ``close`` stops what runs and frees everything.

    ``stall_timeout``: seconds a worker waits for another before the launch is aborted (``None``: what target.toml says;
    time without a processor does not count). ``probe``: run a build of the
    artifact's source that also stores every stage's outputs; ``profile``: one that keeps its workers' clocks; ``fault``: one
    that injects this fault (all need a compiler).
    ``progress`` is told what is done while weights are uploaded (step, bytes done, bytes in all).
    Raises ArtifactError for a damaged file, MachineMismatch, ToolchainError, EnvironmentFailure; BadInput for builds that
    the target does not have.
    """

    def __init__(
        self,
        artifact: Artifact,
        *,
        stall_timeout: float | None = None,
        probe: bool = False,
        profile: bool = False,
        fault: Fault | None = None,
        progress: Callable[[str, float, float], None] | None = None,
    ) -> None:
        self.artifact = artifact
        limit = _positive(stall_timeout)
        self._probing, self._fault = probe, fault
        _check_profile(artifact, probe, profile)
        artifact.verify_hashes()
        self._defines = ("KOGC_PROBE",) * probe + (_PROFILE,) * profile + ("KOGC_FAULT",) * (fault is not None)
        self._device = open_device(artifact, self._defines)
        self._stall_timeout = limit or target_facts(artifact.manifest.target)["spin_limit_s"]
        #: Held while a kernel runs: exchange buffers exist once. The kernel's own end releases it.
        self._running = threading.Lock()
        self._jobs: weakref.WeakSet[Job] = weakref.WeakSet()
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._blocks: list[Block] = []
        self._closed = False
        # Also at the interpreter's end: no kernel may write while memory is taken down.
        self._finalizer = weakref.finalize(self, _stop_all, self._jobs, self._device)
        try:
            self._ranks = range(artifact.manifest.ranks)
            self._exchange = [self._own(self._device.needs.exchange, "the exchange buffers") for _ in self._ranks]
            self._kv = [self._own(self._device.needs.kv, self._kv_name) for _ in self._ranks]
            self._stamps = self._own(self._device.needs.probe, "the workers' clocks") if profile else None
            self._pointers = self._upload(progress or (lambda step, done, total: None))
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int | None = None,
        stop: str | int | Sequence[str | int] | None = None,
        session: Session | None = None,
        stall_timeout: float | None = None,
        ignore_eos: bool | None = None,
        sampling: SamplingParams | None = None,
    ) -> Generation:
        """Continue ``prompt`` (text or ids) as ``sampling`` says, by default greedily, and return an iterator over the tokens.

        ``max_tokens``, ``stop`` and ``ignore_eos`` take the place of those in ``sampling``. The artifact's EOS ids end it unless
        ``ignore_eos``; ``stop`` adds strings and ids. With a ``session`` the prompt continues that conversation, else the context starts empty. The kernel starts at once and runs ahead of a slow reader; while
        another generation of this engine runs, the call waits for its end.

        Raises BadInput (empty prompt, id outside the vocabulary, text without tokenizer …) and ContextOverflow here,
        KernelStalled and NumericError while iterating.
        """
        called_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        self._check_open()
        params = (sampling or SamplingParams()).with_changes(max_tokens=max_tokens, stop=stop, ignore_eos=ignore_eos)
        self._check_sampling(params)
        stop_texts, stop_ids = self._stops(params)
        if session is not None:
            self._claim(session)
        try:
            # A conversation under way needs no second start token.
            new = self._ids(prompt, start=session is None or not session.ids)
            ids = (session.pending if session else []) + new
            start = session.cached if session else 0
            self._check_room(start, len(ids))
            text = TextStream(self.artifact.tokenizer, ids, stop_texts)
            # After the last position one more token can be sampled, but not continued.
            ring = min(params.max_tokens, self.artifact.manifest.context - start - len(ids) + 1)
            draw = None if params.greedy else self._draw(params, (session.ids if session else []) + new)
            job = self._start(
                Request(
                    ids, start, session.kv if session else self._kv, _positive(stall_timeout) or self._stall_timeout,
                    max_tokens=ring, stop_ids=stop_ids, draw=draw,
                )
            )  # fmt: skip
        except BaseException:
            if session is not None:
                session.release()
            raise
        if session is not None:
            session.attach(job)
        settled = partial(self._settle, session, new, start + len(ids), ring < params.max_tokens)
        return Generation(job, text, ids, called_ns, settled)

    def logits(self, ids: Sequence[int], session: Session | None = None) -> np.ndarray:
        """Teacher-forced logits, fp32 [T, vocab]: row t follows ``ids[: t + 1]``. The context starts empty, or with all that
        was said in ``session``, which stays as it was.

        Raises BadInput, ContextOverflow, KernelStalled, NumericError.
        """
        self._check_open()
        if session is None:
            return self._teacher_forced(self._checked(ids))
        self._claim(session)
        try:
            pending = session.pending
            return self._teacher_forced(pending + self._checked(ids, len(session.ids)), session)[len(pending) :]
        finally:
            session.release()

    def probe(self, ids: Sequence[int]) -> np.ndarray:
        """What the stages published in the last step of a teacher-forced run over ``ids``: fp32 [probe floats].

        ``kogc.codegen.layout`` says where each value lies. Raises BadInput unless the engine was made with ``probe=True``.
        """
        if not self._probing:
            raise BadInput("this engine has no probes; make it with artifact.engine(probe=True)")
        ids = self._checked(ids)
        memory = self._device.alloc(self._device.needs.probe, "the probes", host=True)
        self._teacher_forced(ids, probe=memory)
        return memory.view(np.float32)

    def stamps(self) -> np.ndarray:
        """The clocks of every worker at every stage of the last step that ran, in the order of ``program.instances()``:
        int64 [workers, instances, 2] in cycles of the worker's own processor, when the stage began and when all it waits for
        was there (0 in stages that wait for nothing). Waits while a kernel runs.

        Raises BadInput unless the engine was made with ``profile=True``.
        """
        self._check_open()
        if self._stamps is None:
            raise BadInput("this engine keeps no clocks; make it with artifact.engine(profile=True)")
        with self._running:
            return self._stamps.read(np.int64).reshape(self.artifact.manifest.workers, -1, 2)

    def session(self) -> Session:
        """A conversation with KV caches of its own: pass it to ``generate`` and only new tokens are processed."""
        self._check_open()
        session = Session([self._device.alloc(self._device.needs.kv, self._kv_name) for _ in self._ranks])
        self._sessions.add(session)
        return session

    def use_kernel(self, artifact: Artifact) -> None:
        """Run another kernel from the next launch on: the engine's own artifact ``with_kernel``, or again as it is. Uploaded
        weights, sessions and their caches stay. Waits while a kernel runs.

        Raises BadInput for another artifact; ArtifactError, MachineMismatch, ToolchainError, and then nothing changes.
        """
        if artifact.manifest.members != self.artifact.manifest.members:
            raise BadInput(f"{artifact.path} is another artifact than the engine's, {self.artifact.path}; make an engine for it")
        with self._running:
            self._check_open()
            self._device.use_kernel(artifact, self._defines)

    def close(self) -> None:
        """Cancel what runs and free all memory. Later calls raise BadInput."""
        if self._closed:
            return
        self._closed = True
        self._finalizer()
        for session in self._sessions:
            session.close()
        for block in self._blocks:
            block.free()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ── launches ──

    def _settle(self, session: Session | None, new: list[int], position: int, cut_short: bool, done: Generation) -> None:
        """A generation has ended that began with the ``new`` ids and generated from context ``position`` on.

        ``cut_short``: the context allowed fewer tokens than were asked for.
        """
        if cut_short and done.finish_reason == "length":
            done.finish_reason = "context"
        if session is not None:
            # The last token was sampled, but not processed; a prompt that was interrupted is processed again.
            cached = position + len(done.ids) - 1 if done.ids else session.cached
            session.settle(session.ids + new + done.ids, cached)

    def _teacher_forced(self, ids: list[int], session: Session | None = None, probe: Block | None = None) -> np.ndarray:
        """Run over ``ids`` behind what ``session`` has cached, or from an empty context; the logits, fp32 [T, vocab]."""
        vocab = self.artifact.manifest.vocab
        logits = self._device.alloc(4 * len(ids) * vocab, "the logits", host=True)
        request = Request(
            ids, session.cached if session else 0, session.kv if session else self._kv, self._stall_timeout,
            teacher_forced=True, logits=logits.address, probe=probe.address if probe else 0,
        )  # fmt: skip
        job = self._start(request)
        if session is not None:
            session.attach(job)
        job.finish()
        return logits.view(np.float32).reshape(len(ids), vocab)

    def _claim(self, session: Session) -> None:
        """Reserve ``session`` for one run. Raises BadInput when it is another engine's, or used already."""
        if session not in self._sessions:
            # Its caches have another engine's size: the kernel would write outside of them.
            raise BadInput("the session belongs to another engine; make one with this engine's session()")
        session.claim()

    def _start(self, request: Request) -> Job:
        if self._stamps is not None:
            request = replace(request, probe=self._stamps.address)
        self._running.acquire()
        try:
            self._check_open()
            # Whatever a cancelled or aborted launch left there must not look like a value of this one.
            for exchange in self._exchange:
                exchange.clear()
            job = Job(
                self._device, self._pointers, request, self._fault,
                self.artifact.manifest.stages, self._device.columns, self.artifact.manifest.workers, self._running.release,
            )  # fmt: skip
        except BaseException:
            self._running.release()
            raise
        self._jobs.add(job)
        return job

    def _upload(self, tell: Callable[[str, float, float], None]) -> list[Pointers]:
        """The pointers of every rank."""
        sections = {(rank, name): self.artifact.section(name, rank) for rank in self._ranks for name in ("stream", "embed", "consts", "plan")}
        total, before, pointers = sum(data.nbytes for data in sections.values()), 0, [{} for _ in self._ranks]
        for (rank, name), data in sections.items():
            told = partial(_tell_uploaded, tell, before, total)
            pointers[rank][name] = self._device.upload(data, f"the weights ({name})", told)
            before += data.nbytes
        peers = self._peers() if len(self._ranks) > 1 else 0
        return [Pointers(**one, exchange=block.address, peers=peers) for one, block in zip(pointers, self._exchange, strict=True)]

    def _peers(self) -> int:
        """Where the addresses of all ranks' exchange buffers are listed."""
        self._blocks.append(self._device.alloc(8 * len(self._ranks), "the list of ranks", host=True))
        self._blocks[-1].view(np.uint64)[:] = [block.address for block in self._exchange]
        return self._blocks[-1].address

    @property
    def _kv_name(self) -> str:
        return f"KV caches of {self.artifact.manifest.context} positions"

    def _own(self, nbytes: int, what: str) -> Block:
        """Memory until ``close``."""
        self._blocks.append(self._device.alloc(nbytes, what))
        return self._blocks[-1]

    # ── input ──

    def _check_open(self) -> None:
        if self._closed:
            raise BadInput("the engine is closed; make another with artifact.engine()")

    def _ids(self, prompt: str | Sequence[int], start: bool) -> list[int]:
        """The prompt as ids. A text at the ``start`` of a context gets the tokenizer's special tokens."""
        if isinstance(prompt, str):
            tokenizer = self.artifact.tokenizer
            if tokenizer is None:
                raise BadInput(
                    f"{self.artifact.path} has no tokenizer, so prompts must be ids (--ids 1,2,3); "
                    "compile with --tokenizer PATH to add one"
                )
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise BadInput(f"the prompt is not valid text: character {error.start} is half of a surrogate pair or a stray byte") from None
            ids = tokenizer.encode(prompt, add_special_tokens=start).ids
        else:
            ids = _listed(prompt)
        bos = self.artifact.manifest.bos_id
        if not ids and start and bos is not None:
            ids = [bos]
        return self._valid(ids)

    def _checked(self, ids: Sequence[int], start: int = 0) -> list[int]:
        """``ids`` as a list of valid ids for which there is room from context position ``start`` on."""
        self._check_open()
        ids = self._valid(_listed(ids))
        self._check_room(start, len(ids))
        return ids

    def _valid(self, ids: list[int]) -> list[int]:
        if not ids:
            raise BadInput("the prompt is empty and the model has no start token; give at least one token")
        vocab = self.artifact.manifest.vocab
        for index, token in enumerate(ids):
            if not isinstance(token, int | np.integer) or isinstance(token, bool):
                raise BadInput(f"token {index} of the prompt is {token!r}, not an integer id")
            if not 0 <= token < vocab:
                raise BadInput(f"token {index} of the prompt is {token}, outside the vocabulary of {vocab} (0 to {vocab - 1})")
        return [int(token) for token in ids]

    def _check_room(self, start: int, tokens: int) -> None:
        context = self.artifact.manifest.context
        if start + tokens > context:
            raise ContextOverflow(start, tokens, context)

    def _check_sampling(self, params: SamplingParams) -> None:
        """Raises BadInput for what the artifact's kernel cannot do, and for ids it does not have."""
        manifest = self.artifact.manifest
        if not params.greedy and not target_facts(manifest.target).get("samples", False):
            raise BadInput(
                f"kernels for {manifest.target} choose the likeliest token only, for now; leave temperature at 0 and the other sampling options out"
            )
        outside = [token for token in params.logit_bias if token >= manifest.vocab]
        if outside:
            raise BadInput(f"logit_bias names token {outside[0]}, outside the vocabulary of {manifest.vocab} (0 to {manifest.vocab - 1})")

    def _draw(self, params: SamplingParams, seen: list[int]) -> Draw:
        seed = secrets.randbits(64) if params.seed is None else int(params.seed) % (1 << 64)
        return Draw(params, seed, seen, self.artifact.manifest.vocab)

    def _stops(self, params: SamplingParams) -> tuple[list[str], tuple[int, ...]]:
        """Stop strings and all ids that end a generation."""
        stop, ignore_eos = params.stop, params.ignore_eos
        entries = [] if stop is None else [stop] if isinstance(stop, str | int | float | np.integer) else list(stop)
        entries += params.stop_token_ids
        texts = [entry for entry in entries if isinstance(entry, str)]
        ids = [entry for entry in entries if not isinstance(entry, str)]
        if any(not text for text in texts):
            raise BadInput("a stop string is empty; leave it out")
        if texts and self.artifact.tokenizer is None:
            raise BadInput(f"{self.artifact.path} has no tokenizer, so stop can only hold ids")
        vocab = self.artifact.manifest.vocab
        for entry in ids:
            if not isinstance(entry, int | np.integer) or not 0 <= entry < vocab:
                raise BadInput(f"stop holds {entry!r}, which is neither text nor an id below {vocab}")
        own = () if ignore_eos else (token for token in self.artifact.manifest.eos_ids if 0 <= token < vocab)
        return texts, tuple(dict.fromkeys((*own, *map(int, ids))))


def _tell_uploaded(tell: Callable[[str, float, float], None], before: int, total: int, done: int) -> None:
    tell("uploading weights", before + done, total)


def _check_profile(artifact: Artifact, probe: bool, profile: bool) -> None:
    if profile and probe:
        raise BadInput("an engine either probes or profiles: storing the outputs of stages changes their times")
    if profile and _PROFILE not in artifact.source:
        raise BadInput(f"kernels for {artifact.manifest.target} keep no clocks, so there is nothing to profile")


def _positive(stall_timeout: float | None) -> float | None:
    if stall_timeout is None:
        return None
    if not isinstance(stall_timeout, int | float | np.number) or not stall_timeout > 0:
        raise BadInput(f"stall_timeout must be a positive number of seconds, not {stall_timeout!r}")
    return min(stall_timeout, _LONGEST_S)


def _listed(ids: Sequence[int]) -> list[int]:
    """``ids`` as a list. Raises BadInput for what is neither text nor a sequence."""
    try:
        return ids.tolist() if hasattr(ids, "tolist") else list(ids)  # arrays and tensors
    except TypeError:
        raise BadInput(f"the prompt is {ids!r}, expected text or a list of token ids") from None


def _stop_all(jobs: weakref.WeakSet[Job], device: Device) -> None:
    """Cancel and join every kernel, then let go of the device."""
    for job in list(jobs):
        job.stop()
    device.close()
