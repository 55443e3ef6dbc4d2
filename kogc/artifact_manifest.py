"""``manifest.json``: everything a reader needs to know about an artifact before touching its binary."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kogc.errors import ArtifactError

#: Raised when an older reader could misunderstand a newer file. New optional facts go to ``meta`` instead.
SCHEMA = 1


@dataclass(frozen=True)
class Section:
    """Where a part of a rank's weights lies: byte ``offset`` from the start (64-aligned) of ``weights/rank-N.bin`` and ``bytes``.
    ``rank``: whose file it is, where it is another's."""

    offset: int
    bytes: int
    rank: int | None = None


@dataclass(frozen=True)
class Member:
    """What one member must contain: its size and one hash per chunk (SHA-256, first 16 bytes, hex)."""

    bytes: int
    chunks: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """Facts about an artifact.

    ``sections[rank]`` maps ``stream``, ``embed``, ``consts``, ``plan`` (the launch struct's pointers of those names) to
    places in ``weights/rank-<rank>.bin``, or in another rank's for what is the same in all; it is empty for code compiled with ``--no-weights``. ``kv_bytes``,
    ``exchange_bytes`` and ``probe_bytes`` (0 unless a probe build) are what the host allocates per rank. ``stages`` are
    stage names by global stage number, as the abort word counts them. ``toolchain`` names compiler, version and flags;
    ``cpu_features`` what the binary may execute (cpuinfo names). ``build_key`` identifies the inputs of the compile.
    ``gate`` holds the accuracy gate's results, ``None`` until it ran. ``members`` is filled in by the writer.
    """

    model: str
    target: str
    dtype: str
    vocab: int
    context: int
    workers: int
    tile_rows: int
    step_tokens: tuple[int, ...]
    launch_version: int
    kv_bytes: int
    exchange_bytes: int
    stages: tuple[str, ...]
    sections: tuple[Mapping[str, Section], ...] = ()
    ranks: int = 1
    probe_bytes: int = 0
    model_type: str | None = None
    shapes: Mapping[str, int] = field(default_factory=dict)
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    toolchain: Mapping[str, Any] = field(default_factory=dict)
    cpu_features: tuple[str, ...] = ()
    build_key: str = ""
    gate: Mapping[str, Any] | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    kogc: str = ""
    schema: int = SCHEMA
    members: Mapping[str, Member] = field(default_factory=dict)

    def to_json(self) -> str:
        """The manifest as indented JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> Manifest:
        """Read back ``to_json``. Raises ArtifactError for a newer schema, a missing or a misshapen field."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ArtifactError(f"manifest.json is not JSON: {error}") from None
        if not isinstance(values, dict) or not isinstance(values.get("schema"), int):
            raise ArtifactError("manifest.json has no schema number; this is not a kogc artifact")
        if values["schema"] > SCHEMA:
            raise ArtifactError(
                f"manifest.json has schema {values['schema']}, this kogc reads up to {SCHEMA}; "
                "upgrade with `pip install -U kogc`"
            )
        try:
            return _from_values(values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"manifest.json is incomplete: {error}") from None


#: Fields that JSON stores as lists and the dataclass holds as tuples.
_TUPLES = ("step_tokens", "stages", "eos_ids", "cpu_features")


def _from_values(values: dict[str, Any]) -> Manifest:
    values = dict(values)
    for name in _TUPLES:
        values[name] = tuple(values[name])
    values["sections"] = tuple(
        {name: Section(**place) for name, place in rank.items()} for rank in values["sections"]
    )
    values["members"] = {
        name: Member(member["bytes"], tuple(member["chunks"])) for name, member in values["members"].items()
    }
    return Manifest(**values)
