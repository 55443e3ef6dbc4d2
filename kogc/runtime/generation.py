"""What ``Engine.generate`` hands back: an iterator of tokens that also knows how the generation went."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace

from kogc.runtime.job import Job
from kogc.runtime.sampler_memory import Logprobs
from kogc.runtime.text import TextStream


@dataclass(frozen=True)
class Token:
    """One generated token. ``text`` is the text that became certain with it: empty while a character is incomplete, for
    the token that ended the generation, and for artifacts without tokenizer. Concatenated, the texts are the answer.
    ``logprobs``: when they were asked for."""

    id: int
    text: str
    logprobs: Logprobs | None = None


@dataclass
class Stats:
    """How a generation went.

    ``ttft_s``: seconds from the call to the first token, prompt included; ``prompt_s``: the part of them in which the kernel
    ran; ``decode_tok_s``: tokens after the first per second between the first and the last (``None`` with fewer than two);
    ``prompt_tokens``: ids processed by this call (a session's cached tokens not counted); ``tokens``: ids generated. Times
    are the kernel's own.
    """

    prompt_tokens: int = 0
    tokens: int = 0
    ttft_s: float | None = None
    prompt_s: float | None = None
    decode_tok_s: float | None = None


class Generation(Iterator[Token]):
    """Tokens as the kernel makes them. Iterate once; ``close()`` (or the end of a ``with`` block) cancels what still runs.

    ``prompt_ids``: the ids given to the kernel; ``ids``: everything generated so far, the token that ended it included;
    ``text``: what was yielded so far; ``finish_reason``: ``None`` while running, then ``stop`` (stop id or string),
    ``length`` (max_tokens), ``context`` (context full) or ``cancelled``; ``stats``: filled in at the end; ``seed``: that of the
    random numbers, which draws the same tokens again; None when nothing is drawn.
    """

    def __init__(
        self, job: Job, text: TextStream, prompt_ids: list[int], called_ns: int, settled: Callable[[Generation], None]
    ) -> None:
        """``called_ns``: the monotonic clock when the user called; ``settled`` is told when the kernel has left."""
        self.prompt_ids = prompt_ids
        self.ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.seed = job.request.draw.seed if job.request.draw else None
        self.stats = Stats(prompt_tokens=len(prompt_ids))
        self._job, self._stream, self._called_ns, self._settled = job, text, called_ns, settled
        self._tokens = self._make_tokens()

    def __next__(self) -> Token:
        try:
            token = next(self._tokens)
        except BaseException:
            # The end, Ctrl-C or an error of the kernel: whatever it is, nothing stays behind.
            self.close()
            raise
        self.text += token.text
        return token

    def close(self) -> None:
        """Cancel the kernel and return when it has left. Harmless when it already has."""
        self._tokens.close()
        if self.finish_reason is None:
            self._finish("cancelled")

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Without attributes when the constructor itself failed.
        if hasattr(self, "_tokens"):
            self.close()

    def _make_tokens(self) -> Generator[Token]:
        """Tokens with their text. One whose text is not certain waits for the next token, or for the end."""
        waiting: Token | None = None
        for token in self._job.tokens():
            self.ids.append(token)
            ends = token in self._job.stop_ids
            text = "" if ends else self._stream.push(token)
            if waiting is not None:
                yield waiting
            waiting = Token(token, text, self._job.logprobs(len(self.ids) - 1))
            if self._stream.stopped:
                break
            if not (ends or self._stream.holding):
                yield waiting
                waiting = None
        self._finish("stop" if self._stream.stopped else self._job.finish_reason)
        self._job.check()
        if waiting is not None:
            yield replace(waiting, text=waiting.text + self._stream.rest())

    def _finish(self, reason: str) -> None:
        self._job.stop()
        self.finish_reason = reason
        times, count = self._job.state, len(self.ids)
        self.stats.tokens = count
        if count:
            self.stats.ttft_s = (times.first_token_ns - self._called_ns) * 1e-9
            self.stats.prompt_s = (times.first_token_ns - times.start_ns) * 1e-9
        # The kernel may have been ahead of the reader: its own count belongs to its own clock.
        made, span = times.produced, times.end_ns - times.first_token_ns
        if made > 1 and span > 0:
            self.stats.decode_tok_s = (made - 1) / (span * 1e-9)
        self._settled(self)
