"""Under which names the files of a model hold the tensors of its Transformers module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key

@dataclass(frozen=True)
class StoredNames:
    """``names``: the module's name of a tensor → the name it is stored under. ``pieces``: the name of one that Transformers would
    put together from several stored ones → one of these."""

    names: Mapping[str, str]
    pieces: Mapping[str, str]


def stored_names(model: nn.Module, stored: Iterable[str]) -> StoredNames:
    """Where the tensors of ``model`` are among those called ``stored``.

    Transformers renames modules over time and keeps rules for older files; a checkpoint of a larger model (one that also sees)
    may hold this one under a prefix. What Transformers itself would pass over is left out; names that nobody knows stay as
    they are.
    """
    stored = list(stored)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    inside = _under_prefix(parameters, stored, model.base_model_prefix)
    found = _renamed(model, parameters, stored) if inside is None else StoredNames(inside, {})
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    kept = {name: key for name, key in found.names.items() if name in parameters or not any(rule.search(name) for rule in ignored)}
    return StoredNames(kept, found.pieces)


def _renamed(model: nn.Module, parameters: Mapping[str, Any], stored: Iterable[str]) -> StoredNames:
    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    names: dict[str, str] = {}
    pieces: dict[str, str] = {}
    for key in stored:
        name, converter = rename_source_key(key, renamings, converters, model.base_model_prefix, parameters)
        (names if converter is None else pieces)[name] = key
    return StoredNames(names, pieces)


def _under_prefix(parameters: Mapping[str, Any], stored: list[str], base: str) -> dict[str, str] | None:
    """Names where the files hold the model as a part of a larger one: its base model under one prefix, all else by its last words."""
    if any(name in stored for name in parameters):
        return None
    inside = [name.removeprefix(f"{base}.") for name in parameters if name.startswith(f"{base}.")]
    known = set(stored)
    prefixes = {key.removesuffix(inside[0]) for key in stored if inside and key.endswith(f".{inside[0]}")}
    prefix = next((prefix for prefix in sorted(prefixes) if all(prefix + name in known for name in inside)), None)
    if prefix is None:
        return None
    found = {f"{base}.{name}": prefix + name for name in inside}
    for name in parameters.keys() - found.keys():
        keys = [key for key in stored if key.endswith(f".{name}")]
        found |= {name: keys[0]} if len(keys) == 1 else {}
    return found
