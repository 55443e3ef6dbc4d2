"""Open an artifact: ``load(path)`` checks the file and gives typed access to what is inside. Nothing in it is executed."""

from __future__ import annotations

import copy
import dataclasses
import io
import mmap
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kogc.artifact_container import Entry, begins_like_ours, read_entries
from kogc.artifact_hashes import CHUNK, check, digest, known_intact, remember_intact
from kogc.artifact_manifest import Manifest
from kogc.errors import ArtifactError, BadInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from kogc.ir.graph import Graph
    from kogc.ir.program import Program
    from kogc.runtime.engine import Engine

_Parsed = TypeVar("_Parsed")

MANIFEST = "manifest.json"
PROGRAM = "program.json"
IR = "ir.json"
TABLES = "tables.npz"
TOKENIZER = "tokenizer.json"
SOURCES = ("kernel.cpp", "kernel.cu", "kernel.hip")
BINARIES = ("kernel.so", "kernel.cubin", "kernel.hsaco")


def weights_name(rank: int) -> str:
    """The member that holds the packed weights of ``rank``."""
    return f"weights/rank-{rank}.bin"


def load(path: str | Path) -> Artifact:
    """Open the artifact at ``path``.

    The structure and all small members are checked against their hashes at once; members larger than a chunk (the
    weights) by ``verify_hashes``. Raises ArtifactError, one line naming the file and the section, for a file that is
    missing, foreign, damaged, truncated or of a newer schema.
    """
    return Artifact(path)


class Artifact:
    """An open ``.kog`` file.

    ``path``: as given; ``manifest``: its facts. Everything else is read when asked for. The file stays mapped until
    ``close`` (or the end of a ``with`` block); replacing it on disk does not disturb an open one.
    """

    def __init__(self, path: str | Path, intact: bool = False) -> None:
        """``intact``: the caller has just written the file, so its large members need no check."""
        self.path = Path(path)
        self._file = _mapped(self.path)
        try:
            self._entries = {entry.name: entry for entry in read_entries(self._file)}
            self.manifest = self._read_manifest()
            self._check_members(lambda entry: entry.size <= CHUNK)
        except ArtifactError as error:
            raise ArtifactError(f"{self.path}: {error}") from None
        self._intact = intact
        #: Members that ``with_kernel`` put in the place of the file's own.
        self._instead: dict[str, memoryview] = {}

    # ── members ──

    @property
    def members(self) -> Mapping[str, int]:
        """Size in bytes of every member, by name, in file order."""
        return {name: len(self._instead[name]) if name in self._instead else entry.size for name, entry in self._entries.items()}

    def member(self, name: str) -> memoryview:
        """The bytes of a member, mapped read-only. Raises ArtifactError for an unknown name."""
        if name not in self._entries:
            raise ArtifactError(f"{self.path}: section {name} is missing (there are {', '.join(self._entries)})")
        if name in self._instead:
            return self._instead[name]
        entry = self._entries[name]
        try:
            return self._file[entry.data : entry.end]
        except ValueError:
            raise BadInput(f"{self.path} is closed; open it again with kogc.load") from None

    def member_text(self, name: str) -> str:
        """A member as text. Raises ArtifactError for an unknown name, or when it is none."""
        try:
            return bytes(self.member(name)).decode()
        except UnicodeDecodeError:
            raise ArtifactError(f"{self.path}: section {name} is not text") from None

    # ── what the members mean ──

    @property
    def source(self) -> str:
        """The emitted kernel."""
        return self.member_text(self._one_of(SOURCES))

    @property
    def binary(self) -> memoryview:
        """The compiled kernel: a shared library, cubin or code object."""
        return self.member(self._one_of(BINARIES))

    @cached_property
    def program(self) -> Program:
        """The rolled program. Raises ArtifactError when this kogc cannot read it."""
        from kogc.ir import serialize

        return self._parsed(PROGRAM, serialize.from_json)

    @cached_property
    def ir(self) -> Graph:
        """The decode graph, with its tables. Raises ArtifactError when this kogc cannot read it."""
        from kogc.ir import serialize

        return self._parsed(IR, lambda text: serialize.graph_from_json(text, self.tables))

    @cached_property
    def tables(self) -> Mapping[str, np.ndarray]:
        """Numeric tables of the graph (rope cos and sin), first axis = position."""
        if TABLES not in self._entries:
            return {}
        with np.load(io.BytesIO(self.member(TABLES)), allow_pickle=False) as arrays:
            return dict(arrays)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or ``None`` for an artifact that only takes ids."""
        if TOKENIZER not in self._entries:
            return None
        from tokenizers import Tokenizer

        # The tokenizers package raises plain Exceptions for anything it cannot read.
        try:
            return Tokenizer.from_str(self.member_text(TOKENIZER))
        except Exception as error:
            raise ArtifactError(f"{self.path}: section {TOKENIZER} cannot be read: {error}") from None

    def weights(self, rank: int = 0) -> np.ndarray:
        """The packed weights of ``rank``: uint8 [bytes], mapped read-only. Raises ArtifactError when there are none."""
        if weights_name(rank) not in self._entries:
            raise ArtifactError(f"{self.path} holds no weights for rank {rank}: it was compiled with --no-weights")
        return np.frombuffer(self.member(weights_name(rank)), np.uint8)

    def section(self, name: str, rank: int = 0) -> np.ndarray:
        """Part ``name`` (``stream``, ``embed``, ``consts``, ``plan``) of a rank's weights: uint8 [bytes], read-only."""
        places = self.manifest.sections[rank] if rank < len(self.manifest.sections) else {}
        if not places:
            self.weights(rank)  # raises where there are none at all, which says more than that a part is missing
        if name not in places:
            raise ArtifactError(f"{self.path}: {MANIFEST} does not say where part {name} of rank {rank} lies")
        place = places[name]
        holder = rank if place.rank is None else place.rank
        weights = self.weights(holder)
        if not 0 <= place.offset <= place.offset + place.bytes <= len(weights):
            raise ArtifactError(f"{self.path}: {MANIFEST} puts part {name} of rank {rank} outside {weights_name(holder)}")
        return weights[place.offset : place.offset + place.bytes]

    # ── checks and use ──

    def verify_hashes(self, again: bool = False) -> None:
        """Check every member against its hashes; remembered by file identity, so that the next start is quick.

        ``again``: check even if remembered. Raises ArtifactError naming the section and the place.
        """
        manifest = bytes(self.member(MANIFEST))
        if not again and (self._intact or known_intact(self.path, manifest)):
            return
        try:
            self._check_members(lambda entry: True)
        except ArtifactError as error:
            raise ArtifactError(f"{self.path}: {error}") from None
        self._intact = True
        remember_intact(self.path, manifest)

    def engine(self, **options: Any) -> Engine:
        """An Engine that runs this artifact; options as in ``kogc.runtime.engine.Engine``.

        This loads and runs the program inside the file: do it with artifacts you trust.
        """
        from kogc.runtime.engine import Engine

        return Engine(self, **options)

    def with_kernel(self, source: str, binary: bytes, **facts: Any) -> Artifact:
        """This artifact with another kernel of the same program in the place of its own, and with manifest fields replaced by
        ``facts``. Nothing is written or copied: both read the same file, and each is closed for itself.
        """
        other = copy.copy(self)
        other._file = self._file[:]
        other._instead = {self._one_of(SOURCES): memoryview(source.encode()), self._one_of(BINARIES): memoryview(binary)}
        other.manifest = dataclasses.replace(self.manifest, **facts)
        return other

    def close(self) -> None:
        """Let go of the file. Arrays handed out stay valid; the mapping ends with the last of them."""
        self._file.release()

    def __enter__(self) -> Artifact:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Artifact {self.path}: {self.manifest.model} for {self.manifest.target}, {self.manifest.dtype}>"

    # ── inside ──

    def _read_manifest(self) -> Manifest:
        entry = next(iter(self._entries.values()))
        if entry.name != MANIFEST:
            raise ArtifactError("this is a zip file, but not a kogc artifact: manifest.json does not come first")
        data = self._file[entry.data : entry.end]
        if digest(data)[0] != entry.crc:
            raise ArtifactError(f"section {MANIFEST} is damaged")
        try:
            text = bytes(data).decode()
        except UnicodeDecodeError:
            raise ArtifactError(f"section {MANIFEST} is not text") from None
        return Manifest.from_json(text)

    def _check_members(self, chosen: Callable[[Entry], bool]) -> None:
        listed = {MANIFEST, *self.manifest.members}
        if listed != set(self._entries):
            odd = ", ".join(sorted(listed ^ set(self._entries)))
            raise ArtifactError(f"{MANIFEST} and the zip directory disagree about {odd}")
        for entry in self._entries.values():
            if entry.name != MANIFEST and chosen(entry):
                check(entry.name, self._file[entry.data : entry.end], self.manifest.members[entry.name])

    def _one_of(self, names: tuple[str, ...]) -> str:
        return next((name for name in names if name in self._entries), names[0])

    def _parsed(self, name: str, parse: Callable[[str], _Parsed]) -> _Parsed:
        text = self.member_text(name)
        try:
            return parse(text)
        except ValueError as error:
            raise ArtifactError(f"{self.path}: section {name} cannot be read: {error}") from None


def begins_like_artifact(path: Path) -> bool:
    """Whether the file at ``path`` is, or once was, an artifact: damaged and truncated ones count, too."""
    try:
        with open(path, "rb") as file:
            return begins_like_ours(memoryview(file.read(64)))
    except OSError:
        return False


def _mapped(path: Path) -> memoryview:
    """The whole file, mapped read-only."""
    try:
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise ArtifactError(f"{path}: the file is empty")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        raise ArtifactError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise ArtifactError(f"{path} is a folder, not a kogc artifact") from None
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from None
