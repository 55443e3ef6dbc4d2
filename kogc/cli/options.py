"""Choices and readers that several commands share."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

import typer

from kogc.errors import BadInput

AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Unpickle a .pt holding a whole module. This runs code from the file.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run the model code that a Hugging Face folder brings along.")]


class Dtype(StrEnum):
    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


def examples(*lines: str) -> str:
    """The last part of a command's help."""
    return "**Examples**\n\n" + "\n\n".join(f"`{line}`" for line in lines)


def read_ids(text: str) -> list[int]:
    """``1,2,3`` or ``1 2 3`` as token ids. Raises BadInput naming what is not a number."""
    ids = []
    for word in text.replace(",", " ").split():
        if not re.fullmatch(r"[+-]?[0-9]{1,4000}", word):
            raise BadInput(f"--ids takes whole numbers like 1,2,3; {word!r} is none")
        ids.append(int(word))
    if not ids:
        raise BadInput("--ids is empty; give at least one token id, like --ids 1,2,3")
    return ids
