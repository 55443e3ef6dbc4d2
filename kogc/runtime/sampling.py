"""How tokens are chosen: the parameters a user gives, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kogc.errors import BadInput

#: As many as OpenAI's servers give.
MAX_LOGPROBS = 20

_SEED_BITS = 64


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, named as in vLLM and OpenAI. Applied in the order of the fields up to ``min_p`` (docs/sampling.md).

    ``repetition_penalty`` > 0 divides the positive and multiplies the negative logits of all tokens seen, prompt included;
    ``presence_penalty`` and ``frequency_penalty`` (−2 to 2) are taken from the logits of tokens generated before, once and for each
    time; ``logit_bias``: token id → what is added to its logit (−100 to 100). ``temperature``: 0 takes the likeliest token. ``top_k``:
    0 or −1 keeps all; ``top_p`` in (0, 1]; ``min_p`` in [0, 1]. ``seed``: the same one draws the same tokens; None: another
    each time. ``logprobs``: log-probabilities of the chosen token and of so many of the likeliest (0 to 20) before any of the above;
    None: none. ``max_tokens``, ``stop`` (strings or ids), ``stop_token_ids`` and ``ignore_eos`` say when it ends.

    Raises BadInput for values out of range.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    max_tokens: int = 256
    stop: str | int | Sequence[str | int] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _number("repetition_penalty", self.repetition_penalty, above=0)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("temperature", self.temperature, 0)
        _number("top_p", self.top_p, above=0, most=1)
        _number("min_p", self.min_p, 0, 1)
        _whole("top_k", self.top_k, -1, 2**31 - 1)
        _whole("max_tokens", self.max_tokens, 1)
        if self.seed is not None:
            _whole("seed", self.seed, -(2 ** (_SEED_BITS - 1)), 2**_SEED_BITS - 1)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if isinstance(self.stop_token_ids, str) or not isinstance(self.stop_token_ids, Sequence):
            raise BadInput(f"stop_token_ids must be a list of ids, not {self.stop_token_ids!r}")
        if not isinstance(self.logit_bias, Mapping):
            raise BadInput(f"logit_bias must map token ids to numbers, not {self.logit_bias!r}")
        for token, bias in self.logit_bias.items():
            _whole("an id in logit_bias", token, 0)
            _number(f"logit_bias of token {token}", bias, -100, 100)

    @property
    def penalises(self) -> bool:
        """Whether it matters which tokens were seen before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is the choice and nothing else is asked for: what every kernel does by itself."""
        return self.temperature == 0 and not self.penalises and not self.logit_bias and self.logprobs is None

    def with_changes(self, **changes: Any) -> SamplingParams:
        """These parameters with those of ``changes`` that are not None."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})


def _number(name: str, value: Any, least: float | None = None, most: float | None = None, above: float | None = None) -> None:
    real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    within = real and math.isfinite(value) and (least is None or value >= least) and (most is None or value <= most) and (above is None or value > above)
    if not within:
        bounds = [f"above {above}"] * (above is not None) + [f"at least {least}"] * (least is not None) + [f"at most {most}"] * (most is not None)
        raise BadInput(f"{name} must be a number {' and '.join(bounds)}, not {value!r}")


def _whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        kind = "" if whole else "a whole number "
        raise BadInput(f"{name} must be {kind}{bounds}, not {value!r}")
