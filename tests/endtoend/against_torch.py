"""Random models for whole-pipeline tests, and what a compiled model must have in common with PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

import kogc
from kogc import compiler
from kogc.artifact import Artifact
from kogc.gate_stages import StageCheck, check_stages
from kogc.models.build import build_model
from kogc.runtime.engine import Engine
from kogc.targets import load_target
from kogc.targets.cpu import toolchain

#: The project's accuracy limits: relative RMSE of the logits. Written down here again, so that nobody moves them unseen.
LIMITS = {"fp32": 1e-4, "fp16": 5e-3, "bf16": 2e-2}
TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def random_model(config: Mapping[str, Any], capacity: int, dtype: str = "fp32", seed: int = 0) -> nn.Module:
    """A reference module in fp32 whose weights ``dtype`` holds exactly, with norms, biases and attention that matter."""
    torch.manual_seed(seed)
    module = build_model(config, capacity).eval()
    for name, parameter in module.named_parameters():
        if "norm" in name:
            value = 0.5 + torch.rand(parameter.shape)
        elif parameter.dim() == 1:
            value = 0.3 * torch.randn(parameter.shape)
        else:
            sharper = 1.6 if any(part in name for part in ("q_proj", "k_proj", "wq", "wk")) else 1.0
            width = 1 if "embed" in name else parameter.shape[-1]
            value = sharper * torch.randn(parameter.shape) * width**-0.5
        parameter.data = value.to(TORCH_DTYPES[dtype]).float()
    return module


def compile_quickly(source: Any, folder: Path, **options: Any) -> Artifact:
    """Compile without optimisation and without the gate: the same source and the same sums, built in a fifth of the time."""
    flags = tuple("-O0" if flag == "-O3" else flag for flag in toolchain.FLAGS)
    with mock.patch.object(toolchain, "FLAGS", flags):
        return kogc.compile(source, target="cpu", output=folder / "model.kog", gate=False, **options)


@contextmanager
def target_facts(**changes: int) -> Iterator[None]:
    """Whatever the compiler loads as its target has these facts instead of its own."""
    changed = lambda name: dataclasses.replace(load_target(name), facts={**load_target(name).facts, **changes})
    with mock.patch.object(compiler, "load_target", changed):
        yield


def random_ids(vocab: int, count: int, seed: int = 0) -> list[int]:
    """Token ids, the first and the last of the vocabulary among them."""
    ids = np.random.default_rng(seed).integers(0, vocab, count)
    ids[: min(2, count)] = (vocab - 1, 0)[:count]
    return ids.tolist()


def torch_logits(module: nn.Module, ids: Sequence[int], step: int | None = None) -> np.ndarray:
    """The module's own logits [T, V], all positions at once or ``step`` at a time, computed where the module is."""
    step, device = step or len(ids), next(module.parameters()).device
    with torch.no_grad():
        parts = [
            module(torch.tensor(ids[start : start + step], device=device), torch.arange(start, min(start + step, len(ids)), device=device))
            for start in range(0, len(ids), step)
        ]
    return torch.cat(parts).float().cpu().numpy()


def relative_rmse(found: np.ndarray, expected: np.ndarray) -> float:
    difference = found.astype(np.float64) - expected
    return float(np.sqrt(np.mean(difference**2) / np.mean(expected.astype(np.float64) ** 2)))


def assert_close(found: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    """Logits within the limits of ``dtype``, and the largest one equal wherever the reference leaves no doubt."""
    assert found.shape == expected.shape and found.dtype == np.float32
    limit, error = LIMITS[dtype], relative_rmse(found, expected)
    assert error <= limit, f"relative RMSE {error:.2e}, limit {limit:.0e}"
    a, b = found.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) >= 1 - limit**2
    assert_greedy(found.argmax(-1).tolist(), expected, dtype)


def assert_greedy(tokens: Sequence[int], expected: np.ndarray, dtype: str) -> None:
    """``tokens[t]`` is the largest of ``expected[t]`` wherever its margin is clear."""
    assert len(tokens) == len(expected)
    second, first = np.partition(expected, -2, axis=-1)[:, -2:].T
    clear = first - second > 6 * LIMITS[dtype] * np.sqrt(np.mean(expected.astype(np.float64) ** 2, axis=-1))
    wrong = np.flatnonzero(clear & (np.asarray(tokens) != expected.argmax(-1)))
    assert not len(wrong), f"another token at {wrong.tolist()} although the margin is clear"


def generated(engine: Engine, ids: Sequence[int], max_tokens: int, **options: Any) -> list[int]:
    return [token.id for token in engine.generate(ids, max_tokens=max_tokens, **options)]


def assert_equal_bits(one: np.ndarray, other: np.ndarray) -> None:
    assert np.array_equal(one.view(np.uint32), other.view(np.uint32))


def assert_computes(engine: Engine, module: nn.Module, capacity: int, dtype: str) -> None:
    """Logits, and generated tokens up to the ``capacity``, agree with ``module``; repeats are equal bit by bit."""
    ids = random_ids(engine.artifact.manifest.vocab, capacity)
    logits = engine.logits(ids)
    assert_close(logits, torch_logits(module, ids), dtype)
    assert_equal_bits(engine.logits(ids), logits)
    tokens = generated(engine, ids[:5], capacity)
    assert len(tokens) == capacity - 4
    assert generated(engine, ids[:5], capacity) == tokens
    assert_greedy(tokens, torch_logits(module, ids[:5] + tokens[:-1])[4:], dtype)


def logits_on_ranks(config: Mapping[str, Any], capacity: int, folder: Path, ranks: int, workers: int, dtype: str = "fp32") -> np.ndarray:
    """The logits of a random model of ``config`` cut over ``ranks`` ranks, which agree with PyTorch's and repeat bit by bit."""
    module, ids = random_model(config, capacity, dtype), random_ids(config["vocab_size"], capacity)
    with compile_quickly(module, folder, dtype=dtype, tp=ranks, workers=workers) as artifact, artifact.engine() as engine:
        assert (artifact.manifest.ranks, artifact.manifest.workers) == (ranks, workers)
        logits = engine.logits(ids)
        assert_close(logits, torch_logits(module, ids), dtype)
        assert_equal_bits(engine.logits(ids), logits)
        assert generated(engine, ids[:5], 9) == generated(engine, ids[:5], 9)
    return logits


def assert_agrees(artifact: Artifact, module: nn.Module, capacity: int, dtype: str) -> Sequence[StageCheck]:
    """``assert_computes``, and every probed stage agrees, too. Returns the checks of the stages."""
    with artifact.engine() as engine:
        assert_computes(engine, module, capacity, dtype)
        checks = check_stages(artifact, random_ids(artifact.manifest.vocab, capacity), LIMITS[dtype])
        assert all(check.passed for check in checks)
    return checks
