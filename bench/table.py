"""One table of what was measured and what was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Row:
    """``limit``: the value must be at least (``least``) or at most that; None: for information."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    least: bool = True
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the value is on the right side of its limit; None without a limit."""
        if self.limit is None:
            return None
        return self.value >= self.limit if self.least else self.value <= self.limit

    def to_json(self) -> dict:
        """The row with its verdict."""
        return asdict(self) | {"met": self.met}


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, columns aligned."""
    cells = [("what", "measured", "required", "met", "note"), *map(_cells, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def line(row: Row) -> str:
    """One row by itself, as soon as it is known."""
    name, measured, required, met, note = _cells(row)
    asked = f" ({required}: {met})" if required else ""
    return f"{name}: {measured}{asked}" + (f"; {note}" if note else "")


def _cells(row: Row) -> tuple[str, ...]:
    required = "" if row.limit is None else f"{'≥' if row.least else '≤'} {_number(row.limit)} {row.unit}".rstrip()
    met = {None: "", True: "yes", False: "NO"}[row.met]
    return row.name, f"{_number(row.value)} {row.unit}".rstrip(), required, met, row.note


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
