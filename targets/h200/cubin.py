"""Reads values out of a cubin, which is an ELF file, without a driver."""

from __future__ import annotations

import struct

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOL_TABLE = 2


def read_array(cubin: bytes, name: str) -> tuple[int, ...] | None:
    """The initial values of the global array ``name`` of 64-bit integers; None when there is no such variable."""
    header = _HEADER.unpack_from(cubin)
    table, count = header[6], header[12]
    sections = [_SECTION.unpack_from(cubin, table + _SECTION.size * i) for i in range(count)]
    for section in sections:
        if section[1] != _SYMBOL_TABLE:
            continue
        names = sections[section[6]]
        for at in range(section[4], section[4] + section[5], _SYMBOL.size):
            symbol = _SYMBOL.unpack_from(cubin, at)
            if _text(cubin, names[4] + symbol[0]) == name:
                start = sections[symbol[3]][4] + symbol[4]
                return struct.unpack_from(f"<{symbol[5] // 8}q", cubin, start)
    return None


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode(errors="replace")
