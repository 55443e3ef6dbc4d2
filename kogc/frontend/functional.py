"""Steps whose KV caches are arguments and results, as modules whose caches are buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kogc.frontend.errors import FrontendError


class CachesAsBuffers(nn.Module):
    """``forward(token [T], position [T]) → logits [T, V]`` of a module ``step(token, position, *caches) → (logits, *caches)``.

    The caches that come back take the places of those that went in, in their order. ``caches`` give shapes and types; they may
    be on the meta device. ``traced_tokens``: T, where the step insists on one.
    """

    def __init__(self, step: nn.Module, caches: Sequence[Tensor], traced_tokens: int | None = None) -> None:
        super().__init__()
        self.step = step
        #: Names of the buffers that a trace passes as further arguments, and whose new contents come back as further results.
        self.cache_arguments = tuple(f"cache_{number}" for number in range(len(caches)))
        if traced_tokens is not None:
            self.traced_tokens = traced_tokens
        for name, cache in zip(self.cache_arguments, caches, strict=True):
            self.register_buffer(name, torch.empty_like(cache, device="meta"), persistent=False)

    def forward(self, token: Tensor, position: Tensor, *caches: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Logits [T, V], and the buffers are written; with ``caches`` nothing is, and the logits and the new caches come back."""
        before = caches or tuple(self.get_buffer(name) for name in self.cache_arguments)
        results = self.step(token, position, *before)
        logits, *after = (results,) if isinstance(results, Tensor) else results
        if [tuple(new.shape) for new in after] != [tuple(old.shape) for old in before]:
            shapes = ", ".join(str(list(new.shape)) for new in after) or "none"
            raise FrontendError(
                f"{type(self.step).__name__} returns caches of {shapes}, expected those it was given: {[list(old.shape) for old in before]}; "
                "write a cache of fixed length at the tokens' positions (caches that grow are not supported)"
            )
        if caches:
            return (logits, *after)
        for old, new in zip(before, after, strict=True):
            old.copy_(new)
        return logits
