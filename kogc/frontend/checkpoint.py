"""``model.pt``: a PyTorch file holding ``{"config", "state_dict", "tokenizer" (optional)}``."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kogc.frontend.errors import FrontendError, UnsafeModelWarning, first_line
from kogc.frontend.model_input import ModelInput, ending_ids, file_identity, reference_module, starting_id
from kogc.frontend.module import load_module
from kogc.frontend.sources import CheckedWeights, TorchWeights, check_weights, stored_dtype

LAYOUT = '{"config": {...}, "state_dict": {...}, "tokenizer": optional}'


def load_checkpoint(path: Path, *, allow_pickle: bool = False, max_context: int | None = None) -> ModelInput:
    """Read a file written by ``torch.save``.

    Tensors stay in the file until they are read. With ``allow_pickle`` a pickled ``nn.Module`` that follows the trace
    contract is accepted as well, with a warning: unpickling runs code from the file.

    Raises:
        FrontendError: damaged file, pickled objects, missing parts, or tensors that do not fit the configuration.
    """
    content = _read(path, allow_pickle)
    if isinstance(content, nn.Module):
        return load_module(content, name=path.stem, identity=file_identity(path), max_context=max_context)
    config, tensors = _parts(path, content)
    module, context, expected = reference_module(config, str(path), max_context)
    tied = ("lm_head.weight",) if config.get("tie_word_embeddings") else ()
    check_weights(expected, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, str(path), tied)
    dtype = stored_dtype((tensors[name].dtype for name in expected), str(path))
    tokenizer, template = content.get("tokenizer"), content.get("chat_template")
    for name, text, expected_text in (("tokenizer", tokenizer, "a tokenizer.json"), ("chat_template", template, "a template")):
        if text is not None and not isinstance(text, str):
            raise FrontendError(f'{path}: "{name}" is of type {type(text).__name__}, expected the text of {expected_text}')
    return ModelInput(
        name=path.stem,
        module=module,
        weights=CheckedWeights(TorchWeights(tensors, str(path)), expected, str(path)),
        config=config,
        tokenizer_json=tokenizer,
        chat_template=template,
        eos_ids=ending_ids(config, str(path)),
        bos_id=starting_id(config, str(path)),
        context=context,
        identity=file_identity(path),
        dtype=dtype,
    )


def _read(path: Path, allow_pickle: bool) -> Any:
    mapped = zipfile.is_zipfile(path)  # files of PyTorch before 1.6 cannot be mapped
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped or None)
    except pickle.UnpicklingError as error:
        if not allow_pickle:
            raise FrontendError(_pickled(path, error)) from error
    except Exception as error:
        raise FrontendError(f"{path} is truncated or damaged: {first_line(error)}") from error
    warnings.warn(f"unpickling {path}: this runs code from the file", UnsafeModelWarning, stacklevel=4)
    try:
        return torch.load(path, map_location="cpu", weights_only=False, mmap=mapped or None)
    except Exception as error:
        raise FrontendError(f"{path} cannot be unpickled: {type(error).__name__}: {first_line(error)}") from error


def _pickled(path: Path, error: Exception) -> str:
    found = re.search(r"GLOBAL ([\w.]+)|([\w.]+) was not an allowed global", str(error))
    if not found:
        return f"{path} is damaged, or holds pickled objects instead of plain tensors; expected {LAYOUT}"
    return (
        f"{path} holds the pickled object {found[1] or found[2]}; loading it would run code from the file. Save {LAYOUT} "
        "with plain tensors instead, or allow pickle (--allow-pickle) if you trust the file"
    )


def _parts(path: Path, content: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    if not isinstance(content, Mapping):
        raise FrontendError(f"{path} holds a {type(content).__name__}, expected {LAYOUT}")
    for part in ("config", "state_dict"):
        if not isinstance(content.get(part), Mapping):
            raise FrontendError(f'{path} has no "{part}" (keys: {_names(content)}); expected {LAYOUT}')
    tensors = dict(content["state_dict"])
    odd = next((name for name, value in tensors.items() if not isinstance(value, torch.Tensor)), None)
    if odd is not None:
        raise FrontendError(f'{path}: "{odd}" in the state dict is a {type(tensors[odd]).__name__}, expected a tensor')
    odd = next((name for name in tensors if not isinstance(name, str)), None)
    if odd is not None:
        raise FrontendError(f"{path}: {odd!r} in the state dict is not a tensor's name; expected text like model.norm.weight")
    odd = next((name for name, tensor in tensors.items() if tensor.layout != torch.strided), None)
    if odd is not None:
        raise FrontendError(f"{path}: tensor {odd} is stored as {tensors[odd].layout}; save it dense (tensor.to_dense())")
    return dict(content["config"]), tensors


def _names(content: Mapping) -> str:
    names = [str(name) for name in content]
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
