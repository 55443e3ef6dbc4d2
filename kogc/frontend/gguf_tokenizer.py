"""The tokenizer inside a GGUF file as a ``tokenizer.json`` of the ``tokenizers`` library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kogc.frontend.errors import FrontendError

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_SPACE = "▁"

_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTES_ONLY = {**_GPT2, "use_regex": False}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _words(digits: str) -> dict[str, Any]:
    """Words with one leading mark, numbers of ``digits``, runs of marks, line ends and spaces apart."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return {"type": "Sequence", "pretokenizers": [_split(pattern), _BYTES_ONLY]}


_PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _GPT2]},
    "llama-bpe": _words("{1,3}"),
    "llama3": _words("{1,3}"),
    "llama-v3": _words("{1,3}"),
    "qwen2": _words(""),
}
# These look a whole word up before merging its pieces.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3")


def tokenizer_json(meta: Mapping[str, Any], where: str) -> str:
    """The text of a ``tokenizer.json`` for the tokenizer in GGUF metadata.

    Byte-level BPE (``gpt2``) and SentencePiece BPE with scores (``llama``) are supported.

    Raises:
        FrontendError: another kind, or parts missing; says that a tokenizer can be given separately.
    """
    kind = meta.get("tokenizer.ggml.model")
    tokens = meta.get("tokenizer.ggml.tokens")
    if not tokens:
        raise FrontendError(f"{where}: the tokenizer has no tokens; give a tokenizer.json separately")
    if kind == "gpt2":
        parts = _byte_level(meta, tokens, where)
    elif kind == "llama":
        parts = _sentence_piece(meta, tokens, where)
    else:
        raise FrontendError(f"{where}: tokenizers of kind {kind!r} are not supported; give a tokenizer.json separately")
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(meta, tokens),
        "post_processor": _post_processor(meta, tokens, kind),
        **parts,
    }
    return json.dumps(whole, ensure_ascii=False)


def _types(meta: Mapping[str, Any], tokens: Sequence[str]) -> list[int]:
    return meta.get("tokenizer.ggml.token_type") or [1] * len(tokens)


def _added(meta: Mapping[str, Any], tokens: Sequence[str]) -> list[dict[str, Any]]:
    """Tokens that are found in the text before it is split; control tokens are not printed."""
    return [
        {
            "id": token,
            "content": tokens[token],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for token, kind in enumerate(_types(meta, tokens))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _post_processor(meta: Mapping[str, Any], tokens: Sequence[str], kind: str) -> dict[str, Any] | None:
    """Puts the beginning-of-text token in front where the model was trained with it."""
    bos = meta.get("tokenizer.ggml.bos_token_id")
    if bos is None or not meta.get("tokenizer.ggml.add_bos_token", kind == "llama"):
        return None
    begin = {"SpecialToken": {"id": tokens[bos], "type_id": 0}}
    text = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    return {
        "type": "TemplateProcessing",
        "single": [begin, text[0]],
        "pair": [begin, *text],
        "special_tokens": {tokens[bos]: {"id": tokens[bos], "ids": [bos], "tokens": [tokens[bos]]}},
    }


def _byte_level(meta: Mapping[str, Any], tokens: Sequence[str], where: str) -> dict[str, Any]:
    pre = meta.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise FrontendError(f"{where}: text splitting {pre!r} is not known (known: {known}); give a tokenizer.json separately")
    merges = meta.get("tokenizer.ggml.merges")
    if not merges:
        raise FrontendError(f"{where}: the tokenizer has no merges; give a tokenizer.json separately")
    return {
        "normalizer": None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "decoder": _GPT2,
        "model": _bpe(tokens, [merge.split(" ", 1) for merge in merges], ignore_merges=pre in _WHOLE_WORDS),
    }


def _sentence_piece(meta: Mapping[str, Any], tokens: Sequence[str], where: str) -> dict[str, Any]:
    scores = meta.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise FrontendError(f"{where}: the tokenizer has no scores; give a tokenizer.json separately")
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if meta.get("tokenizer.ggml.add_space_prefix", True) else []
    types = _types(meta, tokens)
    unknown = next((tokens[token] for token, kind in enumerate(types) if kind == _UNKNOWN), None)
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*prefix, {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": _bpe(tokens, _merges_by_score(tokens, scores, types), unk_token=unknown, byte_fallback=_BYTE in types, fuse_unk=True),
    }


def _merges_by_score(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[list[str]]:
    """Every way to make a token of two others, best score of the made token first: how SentencePiece joins pieces."""
    pieces = {text: token for token, text in enumerate(tokens) if types[token] not in (_UNKNOWN, _CONTROL, _BYTE)}
    found = []
    for text, token in pieces.items():
        ways = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        found += [(-scores[token], token, [left, right]) for left, right in ways if left in pieces and right in pieces]
    return [pair for _, _, pair in sorted(found, key=lambda way: way[:2])]


def _bpe(tokens: Sequence[str], merges: Sequence[Sequence[str]], **more: Any) -> dict[str, Any]:
    settings = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {text: token for token, text in enumerate(tokens)},
        "merges": merges,
    }
    return settings | more
