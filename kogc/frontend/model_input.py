"""What every frontend makes of its input."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kogc.frontend.errors import FrontendError
from kogc.ir.weights import WeightSource
from kogc.models.build import build_model, parse_config
from kogc.models.config import ConfigError


@dataclass(frozen=True)
class ModelInput:
    """A model ready to be traced and packed.

    Attributes:
        name: short name for messages and the artifact.
        module: follows the trace contract; its parameters may be on the meta device. Reference modules are fp32.
        weights: the values, read and checked one tensor at a time; keys are the module's parameter names.
        config: the model's own configuration, as read; empty for a live module.
        tokenizer_json: contents of a ``tokenizer.json``, or None.
        chat_template: Jinja source, or None.
        eos_ids: token ids that end a text; may be empty.
        bos_id: token id that begins a text, or None.
        context: positions the module's caches hold; None when only tracing will tell.
        identity: changes whenever the model changes; for caching what was made from it.
        dtype: how the weights are stored (``fp16`` …), for a quantised file what it is widened to.
    """

    name: str
    module: nn.Module
    weights: WeightSource
    config: Mapping[str, Any]
    tokenizer_json: str | None
    chat_template: str | None
    eos_ids: tuple[int, ...]
    bos_id: int | None
    context: int | None
    identity: str
    dtype: str

    def with_tokenizer(self, tokenizer_json: str) -> ModelInput:
        """The same model with another tokenizer."""
        return replace(self, tokenizer_json=tokenizer_json, identity=digest(self.identity, tokenizer_json))


def reference_module(
    config: Mapping[str, Any], where: str, max_context: int | None
) -> tuple[nn.Module, int, dict[str, tuple[int, ...]]]:
    """The reference module for ``config``, parameters and caches on the meta device; its context; its tensors' shapes by name.

    Raises FrontendError, beginning with ``where``, for a configuration that is not understood or a context beyond the
    model's own.
    """
    try:
        own = parse_config(config).max_position_embeddings
        context = own if max_context is None else max_context
        if not 1 <= context <= own:
            raise FrontendError(f"{where}: a context of {context} was asked for, the model has {own} positions")
        with torch.device("meta"):
            module = build_model(config, context)
    except ConfigError as error:
        raise FrontendError(f"{where}: {error}") from error
    return module, context, {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def ending_ids(config: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """``eos_token_id`` of a configuration, which may be one id or a list. Ids that the vocabulary does not hold never come.

    Raises FrontendError, beginning with ``where``, for anything but ids.
    """
    value = config.get("eos_token_id")
    found = list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
    odd = next((token for token in found if type(token) is not int), None)
    if odd is not None:
        raise FrontendError(f"{where}: `eos_token_id` holds {odd!r}, expected a token id or a list of them")
    vocab = config.get("vocab_size")
    return tuple(token for token in found if token >= 0 and (vocab is None or token < vocab))


def starting_id(config: Mapping[str, Any], where: str) -> int | None:
    """``bos_token_id`` of a configuration. Raises FrontendError, beginning with ``where``, when it is not in the vocabulary."""
    token, vocab = config.get("bos_token_id"), config.get("vocab_size")
    if token is not None and (type(token) is not int or token < 0 or (vocab is not None and token >= vocab)):
        raise FrontendError(f"{where}: `bos_token_id` is {token!r}, expected a token id" + (f" below {vocab}" if vocab else ""))
    return token


def digest(*parts: str) -> str:
    """A short hash of some texts, boundaries included."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part.encode())
    return state.hexdigest()


def file_identity(*paths: Path) -> str:
    """Changes when one of the files is replaced or rewritten: path, size and modification time in ns."""
    stats = [(path.resolve(), path.stat()) for path in paths]
    return digest(*(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}" for path, stat in stats))
