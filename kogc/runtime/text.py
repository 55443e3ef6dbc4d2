"""From token ids to text that can be shown: whole characters only, and nothing behind a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Ids of the prompt that may influence how the first new token is written.
_CONTEXT_IDS = 8


class TextStream:
    """Decodes ids one by one. Text that might turn out to begin a stop string is held back until it is decided.

    ``prompt``: ids before the first one pushed; a tokenizer that strips the space before a text's first word needs them
    to know that this is not the first word. ``stopped`` is set when a stop string was found.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int] = (), stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._held = ""
        self.stopped = False
        self._restart(list(prompt[-_CONTEXT_IDS:]))

    @property
    def holding(self) -> bool:
        """Whether some text waits for the next token to decide about it."""
        return bool(self._held)

    def push(self, token: int) -> str:
        """Take the next id; the text that is certain now."""
        self._held += self._decoded(token)
        found = min((at for at in map(self._held.find, self._stops) if at >= 0), default=-1)
        if found >= 0:
            self.stopped = True
            text, self._held = self._held[:found], ""
            return text
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def rest(self) -> str:
        """What was held back when the ids ended. The bytes of a character that never became whole are dropped."""
        text, self._held = self._held, ""
        return text

    def _decoded(self, token: int) -> str:
        if self._tokenizer is None:
            return ""
        # Some decoders change text they have already shown when more ids arrive; the stream then refuses to go on, and
        # a new one that starts at this token continues without repeating anything.
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception:
            self._restart([])
            return self._stream.step(self._tokenizer, token) or ""

    def _restart(self, before: list[int]) -> None:
        if self._tokenizer is not None:
            from tokenizers.decoders import DecodeStream

            self._stream = DecodeStream(ids=before, skip_special_tokens=True)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
