"""A speed and what entitles anybody to print it: a passed gate on this machine and the bandwidth ceiling beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kogc.artifact import Artifact
from kogc.cache import cache_folder, content_key, write_atomically
from kogc.ceiling import read_ceiling
from kogc.errors import KogcError
from kogc.runtime import cuda_ceiling
from kogc.runtime.device import device_id
from kogc.runtime.generation import Stats
from kogc.traffic import traffic


#: Target → what measures its read ceiling over given bytes (uint8 [n]) with so many workers, in bytes per second.
_CEILINGS = {"cpu": read_ceiling, "h200": cuda_ceiling.read_ceiling}


@dataclass(frozen=True)
class Speed:
    """``tok_s`` is None when no gate has passed on this machine. ``ceiling_share``: bytes per second reached, as a
    fraction of what plain reading of the same bytes reaches. ``line`` says it all in one line."""

    tok_s: float | None
    ceiling_share: float | None
    gate: Mapping[str, Any] | None
    line: str


def measured_speed(artifact: Artifact, stats: Stats) -> Speed:
    """What may be said about a generation that just ended on ``artifact``."""
    gate = passed_gate(artifact)
    if gate is None:
        note = "no accuracy gate has passed on this machine, so no speed is shown"
        return Speed(None, None, None, f"{stats.tokens} tokens; {note}: run `kogc verify {artifact.path}`")
    if stats.decode_tok_s is None:
        return Speed(None, None, gate, f"{stats.tokens} tokens, too few for a speed; accuracy gate passed")
    share = ceiling_share(artifact, stats.decode_tok_s, stats.prompt_tokens + stats.tokens // 2)
    first = f"first token after {stats.ttft_s * 1e3:.0f} ms, " if stats.ttft_s is not None else ""
    line = f"{stats.tokens} tokens, {first}{stats.decode_tok_s:.0f} tok/s = {beside_ceiling(share)}, {gate_words(gate)}"
    return Speed(stats.decode_tok_s, share, gate, line)


def beside_ceiling(share: float | None) -> str:
    """What is told beside a speed: its share of the read ceiling."""
    return f"{share:.0%} of the read ceiling" if share is not None else "read ceiling not measured here"


def gate_words(gate: Mapping[str, Any]) -> str:
    """What is told beside a speed: the passed ``gate`` that entitles to it, and how far it was from the limit."""
    return f"accuracy gate passed ({gate['rel_rmse']:.1e} of {gate['limit']:.0e})"


def passed_gate(artifact: Artifact) -> Mapping[str, Any] | None:
    """The gate that passed for exactly this file on this machine: at compile time, or by a later `kogc verify`."""
    recorded, here = artifact.manifest.gate, device_id(artifact.manifest.target)
    if recorded and recorded["passed"] and recorded["machine"] == here:
        return recorded
    try:
        later = json.loads(_record(artifact).read_text())
    except (OSError, ValueError, KogcError):
        return None
    return later if later["passed"] and later["machine"] == here else None


def remember_gate(artifact: Artifact, gate: Mapping[str, Any]) -> None:
    """Keep the result of `kogc verify` beside the cache: the artifact itself is never rewritten."""
    write_atomically(_record(artifact), json.dumps(dict(gate)).encode())


def ceiling_share(artifact: Artifact, tok_s: float, position: int) -> float | None:
    """``tok_s`` around context position ``position`` as a share of what plain reading of the same bytes reaches; None where
    that cannot be measured."""
    measure = _CEILINGS.get(artifact.manifest.target)
    if measure is None:
        return None
    ranks = artifact.manifest.ranks
    streams = [artifact.section("stream", rank) for rank in range(ranks)]
    stream = streams[0] if ranks == 1 else np.concatenate(streams)  # ranks on one machine share its bandwidth
    try:
        ceiling = measure(stream, ranks * artifact.manifest.workers)
    except KogcError:
        return None
    per_token = stream.nbytes + traffic(artifact.program, min(position, artifact.manifest.context - 1)).kv
    return tok_s * per_token / ceiling


def _record(artifact: Artifact) -> Path:
    # The manifest holds the hash of every member, so it identifies the content wherever the file lies.
    return cache_folder("gates") / f"{content_key(artifact.manifest.to_json())}.json"
