"""Writes docs/ir-reference.md from the op table: python docs/generate_ir_reference.py"""

from __future__ import annotations

from pathlib import Path

from kogc.ir.ops import OpRow, all_rows

PAGE = Path(__file__).with_name("ir-reference.md")

INTRO = """\
# IR reference

Generated from the op table by `python docs/generate_ir_reference.py`; a test holds that it is current.

One graph class serves every level. A node has an op, operands, attributes and one result; `T` is the number of tokens of a
step. Values of the decode level are `[T, features]` or, in a model with lanes, `[T, lanes, features]`.

`kogc inspect model.kog --ir` prints the decode graph of an artifact in a form that `kogc.ir.text.parse` reads back.

**Role** says where the fuser may place an op: *core* begins a stage; *rowwise* needs only element i of its operands for
element i of its result and fits the epilogue of the stage that makes them; *whole* needs whole vectors and is computed by
every worker in the prologue of the stage that reads it; *state* writes a KV cache; *leaf* comes from outside the step.
"""

TENSOR = """\
## Tensor level

What `torch.export` gives, made functional: ATen's operations with ATen's meaning. Attributes are `args` and `kwargs` of the
call, with `Ref(i)` in place of operand i. These operations can be interpreted and recognised:
"""


def page() -> str:
    """The whole page."""
    rows = all_rows()
    decode = [row for row in rows if row.role not in ("leaf", "tensor")]
    return "\n".join(
        [
            INTRO,
            "## Leaves\n",
            *(_entry(row) for row in rows if row.role == "leaf"),
            "## Decode level\n",
            *(_entry(row) for row in decode),
            TENSOR,
            _columns(row.name for row in rows if row.role == "tensor"),
        ]
    )


def _entry(row: OpRow) -> str:
    required = len(row.operands) - row.optional
    operands = ", ".join([*row.operands[:required], *(f"[{name}]" for name in row.operands[required:])])
    lines = [f"### `{row.name}({operands})`", "", f"{_code(row.doc)} *({row.role})*", ""]
    if row.attrs:
        lines += ["| attribute | type |", "|---|---|", *(f"| `{name}` | `{_cell(kind)}` |" for name, kind in row.attrs.items()), ""]
    return "\n".join(lines)


def _code(text: str) -> str:
    return text.replace("``", "`")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _columns(names) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
