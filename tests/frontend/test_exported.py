"""Exported programs (.pt2), and steps whose caches go in and come out."""

import io
import json
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kogc
from kogc.frontend.errors import FrontendError, UnsafeModelWarning
from kogc.frontend.functional import CachesAsBuffers
from kogc.frontend.load import load_model
from kogc.frontend.trace import trace
from kogc.ir.interpret import run_sequence
from kogc.ir.passes.recognize import recognize
from kogc.ir.verify import verify

VOCAB, WIDTH, HEADS, SIZE, CAPACITY = 19, 24, 3, 8, 12
TOKENS = [3, 1, 4, 1, 5, 9, 2]


class Functional(nn.Module):
    """One attention layer over caches [heads, capacity, size] that are arguments and results."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)

    def attend(self, x, position, keys, values):
        q, k, v = (f(self.norm(x)).view(-1, HEADS, SIZE).transpose(0, 1) for f in (self.q, self.k, self.v))
        keys, values = keys.index_copy(1, position, k), values.index_copy(1, position, v)
        mask = position[:, None] >= torch.arange(CAPACITY)
        y = F.scaled_dot_product_attention(q, keys, values, mask)
        return x + self.o(y.transpose(0, 1).reshape(-1, WIDTH)), keys, values

    def forward(self, token, position, keys, values):
        x, keys, values = self.attend(self.embed(token), position, keys, values)
        return F.linear(x, self.embed.weight), keys, values


class InPlace(Functional):
    """The same with buffers that are written in place."""

    def __init__(self):
        super().__init__()
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(HEADS, CAPACITY, SIZE))

    def forward(self, token, position):
        x, keys, values = self.attend(self.embed(token), position, self.keys, self.values)
        self.keys.copy_(keys)
        self.values.copy_(values)
        return F.linear(x, self.embed.weight)


class Growing(Functional):
    def forward(self, token, position, keys, values):
        return F.linear(self.embed(token), self.embed.weight), torch.cat([keys, keys], 1), torch.cat([values, values], 1)


def caches():
    return tuple(torch.zeros(HEADS, CAPACITY, SIZE) for _ in range(2))


def exported(module: nn.Module, path: Path, tokens: int = 4, extra: tuple = ()) -> Path:
    example = (torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens), *extra)
    torch.export.save(torch.export.export(module.eval(), example, strict=False), path)
    return path


def expected() -> np.ndarray:
    with torch.no_grad():
        return Functional()(torch.tensor(TOKENS), torch.arange(len(TOKENS)), *caches())[0].numpy()


def check(model) -> None:
    graph = verify(recognize(trace(model.module)))
    np.testing.assert_allclose(run_sequence(graph, TOKENS, model.weights), expected(), rtol=0, atol=1e-5)
    assert (graph.meta["capacity"], len(graph.effects)) == (CAPACITY, 2)


@pytest.mark.parametrize("tokens", [2, 4])
def test_an_exported_step_with_buffers(tokens, tmp_path):
    model = load_model(exported(InPlace(), tmp_path / "step.pt2", tokens))
    check(model)
    assert (model.name, trace(model.module).meta["tokens"]) == ("step", tokens)
    sources = {node.source for node in trace(model.module) if node.op == "aten.scaled_dot_product_attention"}
    assert all("test_exported.py:" in source for source in sources) and len(sources) == 1


def test_an_exported_step_whose_caches_are_inputs_and_results(tmp_path):
    check(load_model(exported(Functional(), tmp_path / "step.pt2", extra=caches())))


def test_a_live_step_whose_caches_are_arguments_and_results():
    step = CachesAsBuffers(Functional(), caches())
    check(load_model(step))


@pytest.mark.compiler
def test_it_compiles_and_passes_the_gate(tmp_path):
    path = exported(Functional(), tmp_path / "step.pt2", tokens=3, extra=caches())
    artifact = kogc.compile(path, output=tmp_path / "step.kog", workers=2)
    assert artifact.manifest.gate["passed"]
    with artifact.engine() as engine:
        np.testing.assert_allclose(engine.logits(TOKENS), expected(), rtol=0, atol=1e-4)


def test_caches_that_grow_are_refused():
    with pytest.raises(FrontendError, match="caches that grow are not supported"):
        trace(CachesAsBuffers(Growing(), caches()))


@pytest.mark.parametrize(
    ("module", "extra", "message"),
    [
        (nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)), None, "has 1 inputs and 1 results, expected forward"),
        (Functional(), (torch.zeros(HEADS, CAPACITY, SIZE, dtype=torch.int64),) * 2, r"expected forward\(token"),
    ],
    ids=["one input", "caches of integers"],
)
def test_another_signature_is_refused(module, extra, message, tmp_path):
    if extra is None:
        torch.export.save(torch.export.export(module, (torch.zeros(4, dtype=torch.int64),), strict=False), tmp_path / "x.pt2")
    else:
        exported(IntegerCaches(), tmp_path / "x.pt2", extra=extra)
    with pytest.raises(FrontendError, match=message):
        load_model(tmp_path / "x.pt2")


class IntegerCaches(Functional):
    def forward(self, token, position, keys, values):
        logits, *_ = super().forward(token, position, keys.float(), values.float())
        return logits, keys + 1, values + 1


# ── what would run code ──


def changed(path: Path, change) -> Path:
    """The archive with ``change(name, content) → content`` applied to its members."""
    result = path.with_name("changed.pt2")
    with zipfile.ZipFile(path) as before, zipfile.ZipFile(result, "w") as after:
        for name in before.namelist():
            after.writestr(name, change(name, before.read(name)))
    return result


class _Payload:
    def __reduce__(self):
        return (print, ("unpickled",))


def _pickle(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _graph(change):
    def apply(name, content):
        if not name.endswith("/models/model.json"):
            return content
        graph = json.loads(content)
        change(graph)
        return json.dumps(graph).encode()

    return apply


DANGERS = {
    "guards as Python code": _graph(lambda graph: graph.update(guards_code=["print('evaluated')"])),
    "a call of torch.hub.load": _graph(lambda graph: graph["graph_module"]["graph"]["nodes"][0].update(target="torch.hub.load")),
    "pickled objects": lambda name, content: _pickle((_Payload(),)) if name.endswith(".pt") else content,
    "the pickled object embed.weight": lambda name, content: content.replace(b'"use_pickle": false', b'"use_pickle": true'),
}


@pytest.mark.parametrize("danger", DANGERS)
def test_a_file_that_would_run_code_is_refused(danger, tmp_path, capfd):
    path = changed(exported(InPlace(), tmp_path / "step.pt2"), DANGERS[danger])
    with pytest.raises(FrontendError, match=f"holds {danger}.*reading it would run code from the file.*--allow-pickle"):
        load_model(path)
    assert "unpickled" not in capfd.readouterr().out


def test_reading_it_all_the_same_warns(tmp_path):
    path = changed(exported(InPlace(), tmp_path / "step.pt2"), DANGERS["guards as Python code"])
    with pytest.warns(UnsafeModelWarning, match="runs code"):
        check(load_model(path, allow_pickle=True))


DAMAGES = {
    "half a graph": lambda name, content: b"{" if name.endswith("model.json") else content,
    "half a pickle": lambda name, content: content[: len(content) // 2] if name.endswith(".pt") else content,
    "no table of weights": lambda name, content: b'{"config": null}' if name.endswith("weights_config.json") else content,
    "a weight without a file": lambda name, content: re.sub(rb'"path_name": "[^"]*"', b'"path_name": null', content),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_one_line(damage, tmp_path):
    path = changed(exported(InPlace(), tmp_path / "step.pt2"), DAMAGES[damage])
    with pytest.raises(FrontendError, match="truncated or damaged") as caught:
        load_model(path)
    assert "\n" not in str(caught.value)
