"""Names of stages and parts, made from the names the model's author gave to weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kogc.ir.shards import CUT_MARK


@dataclass(frozen=True)
class WeightName:
    """A weight key taken apart: ``model.layers.3.self_attn.q_proj.weight`` is root ``model``, layer ``layers.3``, path
    ``(self_attn, q_proj)``. ``layer`` is None outside numbered layers; the root then stays in the path."""

    root: tuple[str, ...]
    layer: str | None
    path: tuple[str, ...]


#: What ``separate_views`` adds to the key of a tensor that is not read as it is stored.
_VIEW = re.compile(r"(\[[^\]]*\]|\.T| as [\dx]+)+$")


def parse_key(key: str) -> WeightName:
    words = _VIEW.sub("", uncut_key(key)).split(".")
    if len(words) > 1 and words[-1] == "weight":
        words.pop()
    number = next((i for i, word in enumerate(words) if word.isdigit() and i > 0), None)
    if number is None or number + 1 == len(words):
        return WeightName((), None, tuple(words))
    return WeightName(tuple(words[: number - 1]), ".".join(words[number - 1 : number + 1]), tuple(words[number + 1 :]))


def uncut_key(key: str) -> str:
    """The key of the tensor that ``key`` is a shard of, or itself."""
    return key.partition(CUT_MARK)[0]


class Namer:
    """Names for one model. Knows all weight keys, so that a prefix shared with the layers (``model.``) can be left out."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._roots = {name.root for name in map(parse_key, keys) if name.layer}

    def path(self, key: str) -> tuple[str, ...]:
        """The key without root, layer and ``weight``."""
        name = parse_key(key)
        if name.layer:
            return name.path
        for root in self._roots:
            if root and name.path[: len(root)] == root and len(name.path) > len(root):
                return name.path[len(root) :]
        return name.path

    def stage(self, keys: Sequence[str]) -> str:
        """``self_attn_q_k_v_proj`` from the keys of q, k and v."""
        words = (word for parent, last in self._by_parent(keys).items() for word in (*parent, join_words(last)))
        return identifier("_".join(words))

    def title(self, keys: Sequence[str]) -> str:
        """``self_attn: q_proj, k_proj, v_proj``."""
        modules = self._by_parent(keys).items()
        return "; ".join(": ".join(filter(None, (".".join(parent), ", ".join(last)))) for parent, last in modules)

    def block(self, keys: Sequence[str]) -> str:
        """The module that owns all keys, as an identifier (``self_attn``); empty when they have several owners."""
        owners = list(self._by_parent(keys))
        return identifier("_".join(owners[0])) if len(owners) == 1 else ""

    def part(self, keys: Sequence[str]) -> str:
        """The last words alone: ``q_proj``, ``gate_up_proj``."""
        return identifier(join_words([self.path(key)[-1] for key in keys]))

    def _by_parent(self, keys: Sequence[str]) -> dict[tuple[str, ...], list[str]]:
        """Last words of the keys under the path of the module that owns them, each once."""
        owned: dict[tuple[str, ...], list[str]] = {}
        for path in dict.fromkeys(map(self.path, keys)):
            owned.setdefault(path[:-1], []).append(path[-1])
        return owned


def join_words(words: Sequence[str]) -> str:
    """``q_k_v_proj`` from q_proj, k_proj, v_proj: a last word that all share is said once."""
    words = list(dict.fromkeys(words))
    pieces = [word.split("_") for word in words]
    shares_end = len(words) > 1 and all(len(piece) > 1 and piece[-1] == pieces[0][-1] for piece in pieces)
    if not shares_end:
        return "_".join(words)
    return "_".join(["_".join(piece[:-1]) for piece in pieces] + [pieces[0][-1]])


def identifier(text: str) -> str:
    """``text`` as a C and Python identifier."""
    text = re.sub(r"\W", "_", text)
    return f"_{text}" if text[:1].isdigit() else text


class Unique:
    """Hands out names that were not given before: ``x``, ``x_2``, ``x_3``."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)

    def __call__(self, wish: str) -> str:
        name, number = wish, 1
        while name in self._taken:
            number += 1
            name = f"{wish}_{number}"
        self._taken.add(name)
        return name
