"""The contestants: each continues the same prompt greedily and says how many tokens a second it made.

A speed is always (tokens − 1) / (time from the first token to the last): prompt and start are left out.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from kogc.artifact import Artifact
from kogc.frontend.model_input import ModelInput
from kogc.reference import fp32_module, rounded

HERE = Path(__file__).parent
#: PyTorch makes a few tokens a second; so many of them are enough for a speed.
TORCH_TOKENS = 16


@dataclass(frozen=True)
class Run:
    """One generation: its speed and what came out. ``ttft_s``: time to the first token where it is known."""

    tok_s: float
    ids: tuple[int, ...]
    ttft_s: float | None = None


class Contestant(Protocol):
    """Something that generates."""

    name: str

    def run(self, prompt: Sequence[int], tokens: int) -> Run:
        """Continue ``prompt`` by ``tokens`` tokens."""


class Kogc:
    """The compiled artifact. Its clock is the kernel's own, so a slow reader of tokens costs nothing."""

    name = "kogc"

    def __init__(self, artifact: Artifact) -> None:
        self._engine = artifact.engine()

    def run(self, prompt: Sequence[int], tokens: int) -> Run:
        generation = self._engine.generate(list(prompt), max_tokens=tokens)
        for _ in generation:
            pass
        stats = generation.stats
        return Run(stats.decode_tok_s, tuple(generation.ids), stats.ttft_s)


class LlamaCpp:
    """llama.cpp in a process of its own, which stays for all rounds."""

    name = "llama.cpp"

    def __init__(self, python: Path, model: Path, threads: int, context: int) -> None:
        command = [str(python), str(HERE / "llama_child.py"), str(model), str(threads), str(context)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.version = self._answer()["version"]

    def run(self, prompt: Sequence[int], tokens: int) -> Run:
        print(json.dumps({"ids": list(prompt), "tokens": tokens}), file=self._process.stdin, flush=True)
        answer = self._answer()
        return Run(answer["tok_s"], tuple(answer["ids"]))

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp's process ended with {self._process.wait()}")
        return json.loads(line)


class Torch:
    """The PyTorch module itself, one token a step; ``compiled``: through torch.compile."""

    def __init__(self, model: ModelInput, dtype: torch.dtype, compiled: bool) -> None:
        self.name = f"torch {'compile' if compiled else 'eager'} {str(dtype).removeprefix('torch.')}"
        self._module = fp32_module(model, rounded(model.weights, set(), "fp32")).to(dtype)
        self._step: Callable = torch.compile(self._module, fullgraph=True, dynamic=False) if compiled else self._module

    @torch.no_grad()
    def run(self, prompt: Sequence[int], tokens: int) -> Run:
        tokens = min(tokens, TORCH_TOKENS)
        token, position = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        made: list[int] = []
        for index in range(len(prompt) + tokens - 1):
            token[0] = prompt[index] if index < len(prompt) else made[-1]
            position[0] = index
            logits = self._step(token, position)
            if index >= len(prompt) - 1:
                made.append(int(logits[0].argmax()))
            if index == len(prompt) - 1:
                began = time.perf_counter()
        return Run((tokens - 1) / (time.perf_counter() - began), tuple(made))
