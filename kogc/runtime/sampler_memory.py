"""What a launch that samples shares with the host: parameters, history, bias, and log-probabilities on their way back."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kogc.codegen.launch import IN_PROMPT, Sampling
from kogc.runtime.device import Device
from kogc.runtime.sampling import SamplingParams

_STRUCT_BYTES = -(-ctypes.sizeof(Sampling) // 64) * 64


@dataclass(frozen=True)
class Draw:
    """How one generation draws its tokens. ``seed``: unsigned, 64 bits. ``seen``: the ids that count as the prompt, those of earlier
    turns included; ``vocab``: ids there are."""

    params: SamplingParams
    seed: int
    seen: Sequence[int]
    vocab: int


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of a token's probability under the model itself, before penalties, temperature and filters: the
    ``chosen`` token's, and (id, log-probability) of the ``top`` ones, likeliest first."""

    chosen: float
    top: tuple[tuple[int, float], ...]


class SamplerMemory:
    """Memory for ``max_tokens`` tokens; it must outlive the launch. ``address`` is that of the struct."""

    def __init__(self, device: Device, draw: Draw, max_tokens: int) -> None:
        params, vocab = draw.params, draw.vocab
        self._top = -1 if params.logprobs is None else min(params.logprobs, vocab)
        row = 0 if self._top < 0 else 2 + 2 * self._top
        sizes = (vocab if params.penalises else 0, vocab if params.logit_bias else 0, max_tokens * row)
        self._memory = device.alloc(_STRUCT_BYTES + 4 * sum(sizes), "what tokens are drawn from", host=True)
        self.address = self._memory.address
        words = self._memory.view(np.uint32)[_STRUCT_BYTES // 4 :]
        history, bias, logprobs = np.split(words, np.cumsum(sizes)[:2])
        if len(history):
            history[np.array(draw.seen, np.int64)] = IN_PROMPT
        if len(bias):
            bias.view(np.float32)[list(params.logit_bias)] = list(params.logit_bias.values())
        self._logprobs = logprobs.reshape(-1, row) if row else None
        begin = self.address + _STRUCT_BYTES
        ends = [begin + 4 * int(end) for end in np.cumsum(sizes)]
        struct = Sampling.from_buffer(self._memory.view(np.uint8))
        struct.seed, struct.temperature, struct.top_p, struct.min_p = draw.seed, params.temperature, params.top_p, params.min_p
        struct.repetition_penalty, struct.top_k, struct.top_logprobs = params.repetition_penalty, max(params.top_k, 0), self._top
        struct.presence_penalty, struct.frequency_penalty = params.presence_penalty, params.frequency_penalty
        struct.history, struct.bias, struct.logprobs = begin if len(history) else None, ends[0] if len(bias) else None, ends[1] if row else None

    def logprobs(self, index: int) -> Logprobs | None:
        """Of generated token ``index``, which must be in the ring; None when they were not asked for."""
        if self._logprobs is None:
            return None
        row = self._logprobs[index]
        chosen, total, *top = row[: 2 + self._top].view(np.float32).tolist()
        ids = row[2 + self._top :].tolist()
        log_total = math.log(total)
        return Logprobs(chosen - log_total, tuple((token, value - log_total) for token, value in zip(ids, top, strict=True)))
