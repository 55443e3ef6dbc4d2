"""The file format of an artifact: a zip64 archive of stored members whose data begins at multiples of 4096 bytes.

There is exactly one way to write a given list of members, byte for byte. A reader therefore checks everything that is
not member data by writing it again and comparing, and ordinary zip tools can still open the file.

    local header │ zip64 sizes │ padding │ data │ local header … │ directory │ zip64 end │ locator │ end
                                         ↑ multiple of 4096
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kogc.errors import ArtifactError

#: Data of every member starts at a multiple of this many bytes, so that it can be mapped and read without copies.
ALIGN = 4096

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
TAIL_BYTES = _END64.size + _LOCATOR.size + _END.size

_VERSION = 45  # the zip version that knows 64-bit sizes
_UTF8_NAMES = 1 << 11
_MIDNIGHT_1980 = (0, 33)  # time and date of every member: equal inputs give equal files
_IN_ZIP64_FIELD = 0xFFFFFFFF
_ZIP64_FIELD = 1
_PADDING_FIELD = 0x474B  # "KG"; readers skip fields they do not know
_REGULAR_FILE = 0o100644 << 16


@dataclass(frozen=True)
class Entry:
    """One member: its ``size`` and ``crc`` (CRC-32), local header at byte ``header``, data at byte ``data``."""

    name: str
    size: int
    crc: int
    header: int
    data: int

    @property
    def end(self) -> int:
        return self.data + self.size


def place(name: str, size: int, crc: int, header: int) -> Entry:
    """The member ``name`` whose local header begins at byte ``header``: padded so that its data is aligned."""
    smallest = header + _LOCAL.size + len(name.encode()) + 20 + 4
    return Entry(name, size, crc, header, -(-smallest // ALIGN) * ALIGN)


def local_header(entry: Entry) -> bytes:
    """Everything between ``entry.header`` and ``entry.data``."""
    name = entry.name.encode()
    zip64 = struct.pack("<2H2Q", _ZIP64_FIELD, 16, entry.size, entry.size)
    padding = entry.data - entry.header - _LOCAL.size - len(name) - len(zip64) - 4
    extra = zip64 + struct.pack("<2H", _PADDING_FIELD, padding) + bytes(padding)
    fixed = _LOCAL.pack(
        b"PK\3\4", _VERSION, _UTF8_NAMES, 0, *_MIDNIGHT_1980, entry.crc, _IN_ZIP64_FIELD, _IN_ZIP64_FIELD, len(name), len(extra)
    )
    return fixed + name + extra


def directory(entries: Sequence[Entry]) -> bytes:
    """Everything behind the last member's data."""
    central = b"".join(map(_central_header, entries))
    start = entries[-1].end
    count = len(entries)
    end64 = _END64.pack(b"PK\6\6", _END64.size - 12, _VERSION, _VERSION, 0, 0, count, count, len(central), start)
    locator = _LOCATOR.pack(b"PK\6\7", 0, start + len(central), 1)
    end = _END.pack(b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, _IN_ZIP64_FIELD, _IN_ZIP64_FIELD, 0)
    return central + end64 + locator + end


def read_entries(file: memoryview) -> list[Entry]:
    """The members of a mapped artifact, all structure checked. Raises ArtifactError naming the damaged section."""
    entries = _parse_directory(file)
    for entry in entries:
        if file[entry.header : entry.data] != local_header(entry):
            raise ArtifactError(f"the header of section {entry.name} is damaged")
    return entries


def _parse_directory(file: memoryview) -> list[Entry]:
    damaged = ArtifactError("the zip directory at the end of the file is damaged") if begins_like_ours(file) else _not_an_artifact(file)
    tail = file[-TAIL_BYTES:]
    if len(file) < TAIL_BYTES or tail[-_END.size :][:4] != b"PK\5\6":
        raise _not_an_artifact(file)
    *_, count, _, size, start = _END64.unpack(tail[: _END64.size])
    if start + size + TAIL_BYTES != len(file) or count * _CENTRAL.size > size:
        raise damaged
    try:
        entries = _parse_central(file[start : start + size], count)
    except (struct.error, UnicodeDecodeError):
        raise damaged from None
    if not entries or file[start:] != directory(entries):
        raise damaged
    return entries


def _parse_central(central: memoryview, count: int) -> list[Entry]:
    """Names, sizes and CRCs; places follow from them."""
    entries: list[Entry] = []
    at = 0
    for _ in range(count):
        fields = _CENTRAL.unpack_from(central, at)
        crc, name_length, extra_length = fields[7], fields[10], fields[11]
        at += _CENTRAL.size
        name = bytes(central[at : at + name_length]).decode()
        size = struct.unpack_from("<Q", central, at + name_length + 4)[0]
        at += name_length + extra_length
        entries.append(place(name, size, crc, entries[-1].end if entries else 0))
    return entries


def _central_header(entry: Entry) -> bytes:
    name = entry.name.encode()
    extra = struct.pack("<2H3Q", _ZIP64_FIELD, 24, entry.size, entry.size, entry.header)
    made_by_unix = 3 << 8 | _VERSION
    fixed = _CENTRAL.pack(
        b"PK\1\2", made_by_unix, _VERSION, _UTF8_NAMES, 0, *_MIDNIGHT_1980, entry.crc,
        _IN_ZIP64_FIELD, _IN_ZIP64_FIELD, len(name), len(extra), 0, 0, 0, _REGULAR_FILE, _IN_ZIP64_FIELD,
    )  # fmt: skip
    return fixed + name + extra


def _not_an_artifact(file: memoryview) -> ArtifactError:
    """A file without an end record: cut off, or something else altogether."""
    if begins_like_ours(file):
        return ArtifactError("the file is truncated: the zip directory at its end is missing; copy or compile it again")
    if not len(file):
        return ArtifactError("the file is empty")
    return ArtifactError("this is not a kogc artifact (a .kog file made by `kogc compile`)")


def begins_like_ours(file: memoryview) -> bool:
    """Whether what is there of the first header is that of an artifact, whose manifest always comes first."""
    name = b"manifest.json"
    return len(file) >= _LOCAL.size and file[:4] == b"PK\3\4" and name[: len(file) - _LOCAL.size] == file[_LOCAL.size :][: len(name)]
