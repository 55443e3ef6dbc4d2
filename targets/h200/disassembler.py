"""A cubin as SASS, the machine's own instructions."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from kogc.errors import ToolchainError
from kogc.targets.h200.cuda_files import find_program
from kogc.targets.run_tool import run_tool


def disassemble(cubin: bytes) -> str:
    """SASS of every function in ``cubin``, with the lines of the emitted source between the instructions.

    nvdisasm from NVIDIA's wheel, a toolkit or Triton's wheel. Raises ToolchainError where there is none, or when it is too
    old for the cubin.
    """
    program = find_program("nvdisasm")
    if program is None:
        raise ToolchainError("no nvdisasm on this machine; `pip install nvidia-cuda-nvdisasm` (Triton's wheel has one, too)")
    with tempfile.TemporaryDirectory(prefix="kogc-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text, _ = run_tool([str(program), "--print-code", "--print-line-info", str(path)])
    return _readable(text)


def _readable(text: str) -> str:
    """Without the assembler's bookkeeping: labels, instructions and source lines stay."""
    kept = []
    for line in text.splitlines():
        place = re.match(r'\s*//## File "[^"]*?([^"/]+)", line (\d+)(.*)', line)
        if place:
            kept.append(f"// {place[1]}:{place[2]}{place[3]}")
        elif not re.match(r"//-+ SYMBOLS|\s*\.(align|sectionflags|section|other|size|type|global|headerflags|elftype|target|sectionentsize|sectioninfo)\b", line):
            kept.append(re.sub(r"\s+$", "", line))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip() + "\n"
