"""A causal language model of Hugging Face Transformers as one decode step with static caches."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import StaticCache, StaticLayer

from kogc.frontend.errors import FrontendError, first_line


def transformers_module(folder: Path, max_context: int | None) -> tuple[nn.Module, int, dict[str, tuple[int, ...]]]:
    """The model of ``folder``, parameters and caches on the meta device; its context; its tensors' shapes by name.

    Runs no code from the folder.

    Raises:
        FrontendError: Transformers does not know the model, or it keeps state that this step cannot hold.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config(decoder=True)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    except Exception as error:  # whatever the configuration makes Transformers raise
        raise FrontendError(f"{folder}: Transformers cannot build the model: {first_line(error)}") from error
    own = config.max_position_embeddings
    context = own if max_context is None else max_context
    if not 1 <= context <= own:
        raise FrontendError(f"{folder}: a context of {context} was asked for, the model has {own} positions")
    _fill_tables(model, folder)
    step = TransformersStep(model.eval(), context)
    return step, context, {name: tuple(tensor.shape) for name, tensor in step.named_parameters()}


def _fill_tables(model: nn.Module, folder: Path) -> None:
    """RoPE frequencies get values: they follow from the configuration and are in no file."""
    for name, part in model.named_modules():
        own = [buffer for buffer in part.buffers(recurse=False) if buffer.is_meta]
        if not own:
            continue
        try:
            part._buffers.update(type(part)(config=part.config)._buffers)
        except (AttributeError, TypeError) as error:
            raise FrontendError(f"{folder}: {name} ({type(part).__name__}) keeps tables that cannot be made anew") from error


class TransformersStep(nn.Module):
    """``forward(token [T], position [T]) → logits [T, V]`` of a Transformers model.

    Its submodules are the model's own, so parameters keep their names. Every layer's cache is a pair of buffers
    ``cache_keys_i``, ``cache_values_i`` [1, KV, capacity, head_dim], for windowed layers too: their mask is in the model.
    """

    def __init__(self, model: nn.Module, capacity: int) -> None:
        super().__init__()
        for name, child in model.named_children():
            self.add_module(name, child)
        self._model = (model,)  # in a tuple, so that its parameters are not registered a second time
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (1, config.num_key_value_heads, capacity, head_dim)
        self._layers = config.num_hidden_layers
        self._capacity = capacity
        for layer in range(self._layers):
            for kind in ("keys", "values"):
                self.register_buffer(f"cache_{kind}_{layer}", torch.empty(shape, device="meta"), persistent=False)

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        """Logits [T, V]; ``position`` counts up from its first value."""
        (model,) = self._model
        cache = StaticCache(model.config, max_cache_len=self._capacity)
        cache.layers = [self._layer(layer, position) for layer in range(self._layers)]
        logits = model(input_ids=token[None], position_ids=position[None], past_key_values=cache, use_cache=True).logits
        return logits[0]

    def _layer(self, index: int, position: Tensor) -> StaticLayer:
        layer = StaticLayer(self._capacity)
        layer.keys, layer.values = self.get_buffer(f"cache_keys_{index}"), self.get_buffer(f"cache_values_{index}")
        layer.dtype, layer.device, layer.is_initialized = layer.keys.dtype, layer.keys.device, True
        _, layer.num_heads, _, layer.k_head_dim = layer.keys.shape
        layer.v_head_dim = layer.k_head_dim
        layer.cumulative_length = position[0].clone()  # the layer counts on, in place
        return layer
