"""Shared by the recogniser's tests: trace a module, recognise it, and hold both graphs and PyTorch against each other."""

import numpy as np
import pytest
import torch

from kogc.frontend.trace import trace
from kogc.ir.graph import Graph
from kogc.ir.interpret import run_sequence
from kogc.ir.passes.recognize import recognize
from kogc.ir.verify import verify
from kogc.ir.weights import MappedWeights


def weights_of(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy() for name, tensor in module.named_parameters(remove_duplicate=False)}


def torch_logits(module: torch.nn.Module, ids: list[int], step: int) -> np.ndarray:
    parts = []
    with torch.no_grad():
        for start in range(0, len(ids), step):
            positions = torch.arange(start, min(start + step, len(ids)))
            parts.append(module(torch.tensor(ids)[positions], positions))
    return torch.cat(parts).numpy()


@pytest.fixture
def recognized():
    """A function: module → its decode graph, after checking that it computes what the module computes."""

    def check(module: torch.nn.Module, length: int = 16, tolerance: float = 1e-9) -> Graph:
        module.eval()
        tensor_graph = trace(module)
        decode = verify(recognize(tensor_graph))
        ids = np.random.default_rng(0).integers(0, decode.meta["vocab"], length).tolist()
        weights = MappedWeights(weights_of(module))
        expected = run_sequence(tensor_graph, ids, weights)
        for step in (1, 3, 4):
            found = run_sequence(decode, ids, weights, step_tokens=step)
            assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()
        by_torch = torch_logits(module, ids, 4)
        assert np.abs(expected - by_torch).max() <= max(tolerance, 1e-9) * np.abs(by_torch).max()
        return decode

    return check


@pytest.fixture
def ops():
    """A function: graph → how often each op occurs, leaves apart."""

    def count(graph: Graph) -> dict[str, int]:
        found: dict[str, int] = {}
        for node in graph:
            if node.op not in ("weight", "table", "cache", "token", "position"):
                found[node.op] = found.get(node.op, 0) + 1
        return found

    return count
