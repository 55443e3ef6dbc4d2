"""A causal language model of Hugging Face Transformers as one decode step with static caches."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from kogc.frontend.errors import FrontendError, first_line, raised_at
from kogc.frontend.placeholders import ready_to_trace
from kogc.frontend.quiet import quiet_torch
from kogc.frontend.transformers_build import build
from kogc.frontend.transformers_names import StoredNames, stored_names

#: Shapes of one layer's keys and values, both [1, KV, capacity, head_dim].
CacheShapes = tuple[tuple[int, ...], tuple[int, ...]]


def transformers_module(folder: Path, max_context: int | None, run_code: bool = False) -> tuple[TransformersStep, int, dict[str, tuple[int, ...]]]:
    """The model of ``folder``, parameters and caches on the meta device; its context; its tensors' shapes by name.

    Runs no code from the folder unless it is told to (``run_code``).

    Raises:
        FrontendError: Transformers has no causal language model for the folder, or it keeps state that this step cannot hold.
    """
    model = build(folder, run_code)
    own = getattr(model.config, "max_position_embeddings", None)
    context = own if max_context is None else max_context
    if context is None:
        raise FrontendError(f"{folder}: the configuration does not say how many positions the model has; choose with --max-context")
    if not 1 <= context <= (own or context):
        raise FrontendError(f"{folder}: a context of {context} was asked for, the model has {own} positions")
    step = TransformersStep(model, cache_shapes(model, context, str(folder)))
    return step, context, {name: tuple(tensor.shape) for name, tensor in step.named_parameters()}


def cache_shapes(model: nn.Module, capacity: int, where: str) -> list[CacheShapes]:
    """What every layer caches, learnt by running the model on two tokens whose values nobody computes.

    Raises FrontendError, beginning with ``where``, for a model that does not run with a cache of keys and values alone.
    """
    cache = Cache(layer_class_to_replicate=DynamicLayer)
    try:
        with torch.no_grad(), quiet_torch(), ready_to_trace(model), FakeTensorMode(allow_non_fake_inputs=True):
            ids, positions = torch.zeros(1, 2, dtype=torch.int64), torch.arange(2)[None]
            model(input_ids=ids, position_ids=positions, use_cache=True, **{_cache_argument(model): cache})
    except Exception as error:  # whatever the model's own code raises
        reason = f"{first_line(error)}{raised_at(error)}"
        raise FrontendError(f"{where}: {type(model).__name__} does not run with a cache of keys and values: {reason}") from error
    if not cache.layers:
        raise FrontendError(f"{where}: {type(model).__name__} caches no keys and values")
    return [tuple((1, kind.shape[1], capacity, kind.shape[3]) for kind in (layer.keys, layer.values)) for layer in cache.layers]


def _cache_argument(model: nn.Module) -> str:
    """Transformers renames this argument of ``forward``."""
    return next((name for name in ("cache", "past_key_values") if name in inspect.signature(model.forward).parameters), "past_key_values")


class TransformersStep(nn.Module):
    """``forward(token [T], position [T]) → logits [T, V]`` of a Transformers model.

    Its submodules are the model's own, so parameters keep their names. Every layer's cache is a pair of buffers
    ``cache_keys_i``, ``cache_values_i`` [1, KV, capacity, head_dim], for windowed layers too: their mask is in the model.
    """

    def __init__(self, model: nn.Module, caches: Sequence[CacheShapes]) -> None:
        super().__init__()
        for name, child in model.named_children():
            self.add_module(name, child)
        self._model = (model,)  # in a tuple, so that its parameters are not registered a second time
        self._layers = len(caches)
        for layer, shapes in enumerate(caches):
            for kind, shape in zip(("keys", "values"), shapes, strict=True):
                self.register_buffer(f"cache_{kind}_{layer}", torch.empty(shape, device="meta"), persistent=False)

    def stored_names(self, stored: Iterable[str]) -> StoredNames:
        """Where the parameters are among the tensors called ``stored``."""
        return stored_names(self._model[0], stored)

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        """Logits [T, V] of tokens at ``position``."""
        (model,) = self._model
        layers = [_PlacedLayer(*(self.get_buffer(f"cache_{kind}_{i}") for kind in ("keys", "values")), position) for i in range(self._layers)]
        cache = {_cache_argument(model): Cache(layers=layers)}
        return model(input_ids=token[None], position_ids=position[None], use_cache=True, **cache).logits[0]


class _PlacedLayer(StaticLayer):
    """A cache layer over given buffers that is written at each token's own position instead of counting tokens."""

    def __init__(self, keys: Tensor, values: Tensor, position: Tensor) -> None:
        super().__init__(keys.shape[-2])
        self.keys, self.values, self.position = keys, values, position
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        _, self.num_heads, _, self.k_head_dim = keys.shape
        self.v_head_dim = values.shape[-1]

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.position, key_states)
        self.values.index_copy_(2, self.position, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> Tensor:
        """[T]: what Transformers adds to 0, 1, 2 … to get the position of every token."""
        return self.position - torch.arange(self.position.shape[0], device=self.position.device)
