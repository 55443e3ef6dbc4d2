"""A conversation whose context is kept between calls."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from kogc.errors import BadInput
from kogc.runtime.device import Block
from kogc.runtime.job import Job


class Session:
    """The KV caches of one conversation, made by ``Engine.session()``.

    ``ids``: every token of the conversation so far, prompts and answers. The caches hold the first ``cached`` of them;
    the rest (usually the last token generated) is processed with the next prompt.
    """

    def __init__(self, kv: Sequence[Block]) -> None:
        self._kv: Sequence[Block] | None = kv
        self._busy = False
        self._job: weakref.ref[Job] | None = None
        self.ids: list[int] = []
        self.cached = 0

    @property
    def kv(self) -> Sequence[Block]:
        """The caches of each rank. Raises BadInput after ``close``."""
        if self._kv is None:
            raise BadInput("the session is closed; start another with engine.session()")
        return self._kv

    @property
    def pending(self) -> list[int]:
        """Tokens of the conversation that are not in the caches yet."""
        return self.ids[self.cached :]

    def reset(self) -> None:
        """Forget the conversation. The memory is used again."""
        self._claimable()
        self.ids, self.cached = [], 0

    def rewind(self, length: int) -> None:
        """Forget all but the first ``length`` ids of the conversation; what the caches hold of these stays there.

        Raises BadInput when there are fewer, or while a generation uses the session.
        """
        self._claimable()
        if not 0 <= length <= len(self.ids):
            raise BadInput(f"the session has {len(self.ids)} tokens, so it cannot go back to {length}")
        self.ids, self.cached = self.ids[:length], min(self.cached, length)

    def claim(self) -> None:
        """Reserve the session for one generation. Raises BadInput while another one uses it."""
        self._claimable()
        self._busy = True

    def attach(self, job: Job) -> None:
        """Name the launch that uses the caches now."""
        self._job = weakref.ref(job)

    def settle(self, ids: list[int], cached: int) -> None:
        """End a generation: the conversation is now ``ids``, of which the caches hold the first ``cached``."""
        self.ids, self.cached, self._busy = ids, cached, False

    def release(self) -> None:
        """End a claim that came to nothing: the conversation stays as it was."""
        self._busy = False

    def close(self) -> None:
        """Cancel the generation that uses the caches, if one does, and free them."""
        job = self._job() if self._job else None
        if job is not None:
            job.stop()
        for block in self._kv or ():
            block.free()
        self._kv = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _claimable(self) -> None:
        if self._busy:
            raise BadInput("another generation is using this session; finish or close it first")
