"""A Hugging Face folder: ``config.json``, ``*.safetensors`` and, if there, ``tokenizer.json``."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from kogc.frontend.errors import FrontendError, UnsafeModelWarning, first_line
from kogc.frontend.import_fx import to_numpy
from kogc.frontend.model_input import ModelInput, digest, ending_ids, file_identity, reference_module, starting_id
from kogc.frontend.sources import CheckedWeights, MissingWeights, RandomWeights, check_weights, stored_dtype
from kogc.models.build import MODEL_TYPES
from kogc.models.config import MAX_LAYERS

_INDEX = "model.safetensors.index.json"
_DECLARED = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
#: What configurations call the number of layers.
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_folder(
    folder: Path, *, random_weights: bool = False, seed: int = 0, max_context: int | None = None, read_weights: bool = True,
    trust_remote_code: bool = False,
) -> ModelInput:  # fmt: skip
    """Read a model folder as Transformers writes it; tensors stay in their files until they are read.

    A folder without files of weights is a model without weights, or with random ones (``random_weights``, by ``seed``); so is every
    folder where ``read_weights`` is false.

    ``trust_remote_code``: a model code that comes along is run, with an UnsafeModelWarning. Otherwise none is, whatever the folder says.

    Raises:
        FrontendError: a missing, damaged or unsupported part, named with its path.
    """
    config = _json(folder / "config.json")
    trusted = trust_remote_code and brings_code(config)
    module, context, expected = _module(folder, config, max_context, trusted)
    shards = _shards(folder) if read_weights else []
    if random_weights and shards:
        raise FrontendError(f"{folder} brings its own weights; random ones are for presets and for folders without weights")
    if shards:
        weights, dtype = _stored_weights(folder, shards, module, config, expected)
    else:
        dtype = _declared_dtype(config)
        weights = RandomWeights(expected, dtype, seed) if random_weights else MissingWeights(expected, str(folder))
    tokenizer = folder / "tokenizer.json"
    settings = folder / "tokenizer_config.json"
    generation = folder / "generation_config.json"
    parts = [path for path in (folder / "config.json", tokenizer, settings, generation, *shards, *_code(folder, trusted)) if path.exists()]
    ids = {**config, **(_json(generation) if generation.exists() else {})}
    return ModelInput(
        name=folder.resolve().name,
        module=module,
        weights=weights,
        config=config,
        tokenizer_json=_text(tokenizer) if tokenizer.exists() else None,
        chat_template=_chat_template(folder, _json(settings) if settings.exists() else {}),
        eos_ids=ending_ids(ids, str(folder)),
        bos_id=starting_id(ids, str(folder)),
        context=context,
        identity=digest(file_identity(*parts), f"random {seed}") if random_weights else file_identity(*parts),
        dtype=dtype,
    )


def _stored_weights(
    folder: Path, shards: Iterable[Path], module: nn.Module, config: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]]
) -> tuple[CheckedWeights, str]:
    """The tensors of the folder's files under the module's names, and how they are stored."""
    weights = SafetensorsWeights(shards)
    if hasattr(module, "stored_names"):
        found = module.stored_names(weights.keys())
        weights.rename(found.names, {name: (key, expected[name]) for name, key in found.pieces.items() if name in expected})
    tied = {name for name, _ in module.named_parameters(remove_duplicate=False)} - expected.keys()
    tied |= {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    check_weights(expected, weights.shapes, str(folder), tied)
    dtype = stored_dtype((weights.dtype(name) for name in expected), str(folder))
    return CheckedWeights(weights, expected, str(folder)), dtype


def _declared_dtype(config: Mapping[str, Any]) -> str:
    """The type that the configuration says the weights have; released models that say nothing are bf16 as a rule."""
    declared = [part.get(name) for part in (config, config.get("text_config") or {}) for name in ("dtype", "torch_dtype")]
    return next((_DECLARED[name] for name in declared if name in _DECLARED), "bf16")


def _module(
    folder: Path, config: Mapping[str, Any], max_context: int | None, trusted: bool
) -> tuple[nn.Module, int, dict[str, tuple[int, ...]]]:
    """The module of the folder's own code where that is ``trusted``; the reference module where kogc has one for this type; otherwise
    the one of Transformers, if that is installed."""
    where = str(folder / "config.json")
    kind = config.get("model_type")
    if not trusted and not isinstance(kind, str):
        raise FrontendError(f"{where}: `model_type` is {kind!r}, expected {', '.join(MODEL_TYPES)} or a type that Transformers knows")
    if not trusted and kind in MODEL_TYPES:
        return reference_module(config, where, max_context)
    if importlib.util.find_spec("transformers") is None:
        raise FrontendError(
            f"{where}: `model_type` is {kind!r}; {', '.join(MODEL_TYPES)} are built in, for others, and for a model's own code, "
            "install transformers"
        )
    for name in _LAYERS:  # before Transformers makes a list of them
        layers = {**(config.get("text_config") or {}), **config}.get(name)
        if isinstance(layers, int) and layers > MAX_LAYERS:
            raise FrontendError(f"{where}: `{name}` is {layers}, expected at most {MAX_LAYERS}")
    from kogc.frontend.transformers_step import transformers_module  # Transformers is optional and slow to import

    if trusted:
        warnings.warn(f"{folder}: this runs the model code of the folder", UnsafeModelWarning, stacklevel=4)
    return transformers_module(folder, max_context, trusted)


def _code(folder: Path, trusted: bool) -> list[Path]:
    return sorted(folder.glob("*.py")) if trusted else []


def brings_code(config: Mapping[str, Any]) -> bool:
    """Whether a folder's configuration names code of its own for the language model."""
    named = config.get("auto_map")
    return isinstance(named, Mapping) and "AutoModelForCausalLM" in named


class SafetensorsWeights:
    """Tensors of one or more safetensors files, read one at a time.

    ``shapes`` gives every tensor's shape from the headers alone. Raises FrontendError for a damaged file or a tensor
    that is in two files.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self.files = tuple(files)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        self._home: dict[str, Any] = {}
        self._stored: dict[str, str] = {}
        self._pieces: Mapping[str, str] = {}
        for path in self.files:
            self._open(path)

    def _open(self, path: Path) -> None:
        try:
            file = safe_open(path, framework="pt")
            for name in file.keys():
                if name in self._home:
                    raise FrontendError(f"{path}: tensor {name} is in another file of the folder, too")
                part = file.get_slice(name)
                self.shapes[name], self._dtypes[name] = tuple(part.get_shape()), part.get_dtype()
                self._home[name], self._stored[name] = file, name
        except (SafetensorError, OSError) as error:
            raise FrontendError(f"{path} is missing, truncated or damaged: {first_line(error)}") from error

    def keys(self) -> Iterable[str]:
        return self._home.keys()

    def get(self, key: str) -> np.ndarray:
        """The values. Raises FrontendError for a tensor that is stored in pieces."""
        if key in self._pieces:
            raise FrontendError(f"tensor {self._pieces[key]} is a piece of {key}; kogc reads tensors as they are stored")
        return to_numpy(self._home[key].get_tensor(self._stored[key]))

    def rename(self, names: Mapping[str, str], pieces: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """From now on tensors are called as in ``names``, new name → name so far; those that it leaves out are gone. ``pieces``:
        new names of tensors that are stored in pieces → one of these, and the shape of the whole."""
        self._pieces = {name: key for name, (key, _) in pieces.items()}
        for kept in (self.shapes, self._dtypes, self._home, self._stored):
            held = dict(kept)
            kept.clear()
            kept.update({name: held[key] for name, key in {**names, **self._pieces}.items()})
        self.shapes |= {name: shape for name, (_, shape) in pieces.items()}

    def dtype(self, key: str) -> torch.dtype | str:
        """Stored type; the file's own name for one that PyTorch weights do not have here."""
        return _DTYPES.get(self._dtypes[key], self._dtypes[key])


def _shards(folder: Path) -> list[Path]:
    """The folder's safetensors files; empty where it has no weights at all."""
    index = folder / _INDEX
    if index.exists():
        mapping = _json(index).get("weight_map")
        if not isinstance(mapping, Mapping):
            raise FrontendError(f'{index} has no "weight_map"')
        return [folder / name for name in sorted(set(mapping.values()))]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        other = next((path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern)), None)
        if other:
            raise FrontendError(f"{folder} has a config.json but no *.safetensors; there is {other}: convert it to safetensors")
    return files


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FrontendError(f"{path} cannot be read: {first_line(error)}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise FrontendError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise FrontendError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    separate = folder / "chat_template.jinja"
    if separate.exists():
        return _text(separate)
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template}
        return named.get("default")
    return template
