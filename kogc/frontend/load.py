"""One entrance for every kind of model: looks at what is there, not at what it is called."""

from __future__ import annotations

import importlib.util
import json
import struct
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from kogc.frontend import preset
from kogc.frontend.checkpoint import load_checkpoint
from kogc.frontend.errors import FrontendError, first_line
from kogc.frontend.exported import is_exported, load_exported
from kogc.frontend.hub import hub_folder, is_hub_id
from kogc.frontend.huggingface import load_folder
from kogc.frontend.model_input import ModelInput
from kogc.frontend.module import load_module

KINDS = "a PyTorch checkpoint, an exported program (.pt2), an ONNX file, a GGUF file, a Hugging Face folder or preset:NAME"


def load_model(
    source: str | Path | nn.Module,
    *,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    tokenizer: str | Path | None = None,
    random_weights: bool = False,
    seed: int = 0,
    max_context: int | None = None,
    weights: bool = True,
) -> ModelInput:
    """Read a model of any supported kind.

    Args:
        source: a live module, ``preset:NAME``, a folder, a file, or the id of a model of the Hugging Face hub; files are told apart
            by their first bytes.
        allow_pickle: accept a pickled module, which runs code from the file.
        trust_remote_code: build a folder's model from the code that it brings along, where it does; without it none of it runs.
        tokenizer: path of a ``tokenizer.json`` that replaces the model's own.
        random_weights: fill a preset, or a folder without weights, with random ones, seeded by ``seed``.
        max_context: positions to compile for; by default all the model has.
        weights: False leaves the weights of a folder, or of a model of the hub, alone: they need not be there.

    Raises:
        FrontendError: one line that says what is wrong with which file and what to do.
    """
    bare = not isinstance(source, nn.Module) and (str(source).startswith(preset.PREFIX) or Path(source).is_dir() or is_hub_id(str(source)))
    if random_weights and not bare:
        raise FrontendError("random weights are for presets and for folders without weights; this model brings its own")
    if isinstance(source, nn.Module):
        model = load_module(source, max_context=max_context)
    elif isinstance(source, str) and source.startswith(preset.PREFIX):
        name = source.removeprefix(preset.PREFIX)
        model = preset.load_preset(name, random_weights=random_weights, seed=seed, max_context=max_context)
    else:
        path = hub_folder(str(source), weights=weights, code=trust_remote_code) if is_hub_id(str(source)) else Path(source)
        if path.is_dir():
            model = _load_folder(
                path, random_weights=random_weights, seed=seed, max_context=max_context, read_weights=weights,
                trust_remote_code=trust_remote_code,
            )  # fmt: skip
        else:
            model = _load_file(path, allow_pickle, tokenizer is None, max_context)
        if path != Path(source):
            model = replace(model, name=Path(source).name)
    if model.context is not None and model.context < 2:
        raise FrontendError(f"{source}: a context of {model.context} leaves no position to look back to; kogc compiles for at least 2")
    if tokenizer is not None:
        model = model.with_tokenizer(_read_tokenizer(Path(tokenizer)))
    if model.tokenizer_json is not None:
        _check_tokenizer(model.tokenizer_json, f"tokenizer {tokenizer}" if tokenizer is not None else f"{source}: the tokenizer")
    return model


def _load_folder(path: Path, **options: Any) -> ModelInput:
    if not (path / "config.json").exists():
        raise FrontendError(f"{path} is a folder without config.json; expected {KINDS}")
    return load_folder(path, **options)


def _load_file(path: Path, allow_pickle: bool, want_tokenizer: bool, max_context: int | None) -> ModelInput:
    head = _head(path)
    if path.suffix.lower() == ".onnx":  # a protobuf has no mark of its own
        return _load_onnx(path, max_context)
    if head.startswith(b"GGUF"):
        from kogc.frontend.gguf import load_gguf  # the gguf package is slow to import and seldom needed

        return load_gguf(path, want_tokenizer=want_tokenizer, max_context=max_context)
    if _is_safetensors(head, path):
        raise FrontendError(f"{path} holds tensors without a configuration; give the folder that also has its config.json")
    if head.startswith((b"PK", b"\x80")):
        names = _archive_names(path, head)
        if is_exported(names):
            return load_exported(path, allow_pickle=allow_pickle, max_context=max_context)
        _check_archive(path, names)
        return load_checkpoint(path, allow_pickle=allow_pickle, max_context=max_context)
    raise FrontendError(f"{path} is not a model file; expected {KINDS}")


def _load_onnx(path: Path, max_context: int | None) -> ModelInput:
    if importlib.util.find_spec("onnx") is None:
        raise FrontendError(f"{path}: reading ONNX needs the onnx package: pip install 'kogc[onnx]'")
    from kogc.frontend.onnx_step import load_onnx  # optional

    return load_onnx(path, max_context=max_context)


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        hint = "" if path.exists() else f"; expected {KINDS}"
        raise FrontendError(f"{path} cannot be read: {error.strerror}{hint}") from error
    if not head:
        raise FrontendError(f"{path} is empty")
    return head


def _archive_names(path: Path, head: bytes) -> list[str]:
    """Members of a zip file; none of a file that is no archive."""
    if not head.startswith(b"PK"):
        return []
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except zipfile.BadZipFile as error:
        raise FrontendError(f"{path} is truncated or damaged: {error}") from error


def _check_archive(path: Path, names: list[str]) -> None:
    """Refuse zip files that are something else than a checkpoint."""
    if not names:
        return
    if "manifest.json" in names:
        raise FrontendError(f"{path} is a compiled artifact already; use kogc run or kogc inspect")
    if any(name.split("/")[1:2] == ["code"] for name in names):
        raise FrontendError(f"{path} is a TorchScript archive; save its config and state dict with torch.save instead")
    if not any(name.endswith("data.pkl") for name in names):
        raise FrontendError(f"{path} is a zip file but not a PyTorch checkpoint; expected {KINDS}")


def _is_safetensors(head: bytes, path: Path) -> bool:
    if len(head) < 9:
        return False
    (length,) = struct.unpack("<Q", head[:8])
    return head[8:9] == b"{" and length < path.stat().st_size


def _read_tokenizer(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
        parsed = json.loads(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise FrontendError(f"tokenizer {path} cannot be read: {reason}") from error
    if not isinstance(parsed, dict) or "model" not in parsed:
        raise FrontendError(f"tokenizer {path} is not a tokenizer.json of the tokenizers library (it has no \"model\")")
    return text


def _check_tokenizer(text: str, what: str) -> None:
    """Raises FrontendError when the tokenizers library cannot read ``text``."""
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exceptions
        raise FrontendError(f"{what} is not a tokenizer.json that the tokenizers library reads: {first_line(error)}") from error
