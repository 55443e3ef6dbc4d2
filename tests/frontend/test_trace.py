"""Models written in several styles trace to graphs that compute what PyTorch computes."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kogc.frontend.errors import FrontendError
from kogc.frontend.import_fx import to_numpy
from kogc.frontend.trace import trace
from kogc.ir.interpret import run_sequence
from kogc.ir.verify import verify
from kogc.ir.weights import MappedWeights

torch.set_num_threads(1)
VOCAB, WIDTH, HEADS, KV, HEAD, CAPACITY = 19, 12, 4, 2, 6, 11


def rotate_half(x, position):
    frequency = 100.0 ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
    angle = position[:, None] * frequency
    cos, sin = (torch.cat((f, f), -1)[:, None].to(x.dtype) for f in (angle.cos(), angle.sin()))
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Step(nn.Module):
    """One attention layer and a head; subclasses write parts of it in another style."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.q = nn.Linear(WIDTH, HEADS * HEAD, bias=True)
        self.k = nn.Linear(WIDTH, KV * HEAD, bias=False)
        self.v = nn.Linear(WIDTH, KV * HEAD, bias=False)
        self.o = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        self.norm = nn.RMSNorm(WIDTH)
        self.drop = nn.Dropout(0.5)
        self.make_caches()
        self.to(dtype)

    def make_caches(self):
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(KV, CAPACITY, HEAD), persistent=False)

    def rope(self, x, position):
        return rotate_half(x, position)

    def append(self, k, v, position):
        self.keys.index_copy_(1, position, k.transpose(0, 1))
        self.values.index_copy_(1, position, v.transpose(0, 1))
        return self.keys, self.values

    def attend(self, q, keys, values, position):
        mask = position[:, None] >= torch.arange(CAPACITY)
        return F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, mask, enable_gqa=True).transpose(0, 1)

    def forward(self, token, position):
        x = self.embed(token)
        y = self.norm(x)
        q, k, v = self.q(y).view(-1, HEADS, HEAD), self.k(y).view(-1, KV, HEAD), self.v(y).view(-1, KV, HEAD)
        keys, values = self.append(self.rope(k, position), v, position)
        mixed = self.attend(self.rope(q, position), keys, values, position)
        x = x + self.drop(self.o(mixed.reshape(-1, HEADS * HEAD)))
        return F.linear(self.norm(x), self.embed.weight)


class IndexAssignment(Step):
    def append(self, k, v, position):
        self.keys[:, position] = k.transpose(0, 1)
        self.values[:, position] = v.transpose(0, 1)
        return self.keys, self.values


class OneStackedCache(Step):
    """Writes through views of one buffer that holds keys and values of all layers."""

    def make_caches(self):
        self.register_buffer("cache", torch.zeros(1, 2, CAPACITY, KV, HEAD))

    def append(self, k, v, position):
        layer = self.cache[0]
        layer[0].index_copy_(0, position, k)
        layer[1, :, :1].index_copy_(0, position, v[:, :1])
        layer[1].transpose(0, 1)[1:].index_copy_(1, position, v.transpose(0, 1)[1:])
        return layer[0].transpose(0, 1), layer[1].permute(1, 0, 2)


class ViewBeforeWrite(Step):
    """Takes a view of the cache first and reads it after the write: it must show the new values."""

    def append(self, k, v, position):
        keys, values = self.keys.unsqueeze(0), self.values.view(KV, CAPACITY, 1, HEAD)
        self.keys.index_copy_(1, position, k.transpose(0, 1))
        values.index_copy_(1, position, v.transpose(0, 1).unsqueeze(2))
        return keys[0], self.values


class WholeCopy(Step):
    def append(self, k, v, position):
        self.keys.copy_(self.keys.index_copy(1, position, k.transpose(0, 1)))
        self.values.copy_(torch.index_put(self.values, (torch.arange(KV)[:, None], position), v.transpose(0, 1)))
        return self.keys, self.values


class ComplexRope(Step):
    def make_caches(self):
        super().make_caches()
        frequency = 100.0 ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
        self.angles = torch.arange(CAPACITY)[:, None] * frequency

    def rope(self, x, position):
        turn = torch.polar(torch.ones_like(self.angles), self.angles)[position][:, None]
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turn).flatten(-2).type_as(x)


class ExplicitSoftmax(Step):
    def attend(self, q, keys, values, position):
        keys, values = (x.repeat_interleave(HEADS // KV, dim=0) for x in (keys, values))
        scores = torch.einsum("thd,hsd->hts", q, keys) / math.sqrt(HEAD)
        age = position[:, None] - torch.arange(CAPACITY)
        scores = scores.masked_fill(torch.logical_or(age < 0, age >= 4)[None], float("-inf"))
        return torch.einsum("hts,hsd->thd", scores.softmax(-1, dtype=torch.float64), values)


class ExpandedGroups(Step):
    def attend(self, q, keys, values, position):
        keys, values = (x[:, None].expand(-1, HEADS // KV, -1, -1).reshape(HEADS, CAPACITY, HEAD) for x in (keys, values))
        scores = torch.matmul(q.permute(1, 0, 2), keys.mT) * HEAD**-0.5
        bias = torch.full((CAPACITY, CAPACITY), -1e30, dtype=q.dtype).triu(diagonal=1)[position]
        scores += bias
        return (F.softmax(scores, dim=-1) @ values).transpose(0, 1).contiguous()


class NoGradInside(Step):
    """Context managers become subgraphs in the export, here even around the cache writes."""

    def rope(self, x, position):
        with torch.autocast("cpu", enabled=False):
            return rotate_half(x, position)

    def append(self, k, v, position):
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            return super().append(k, v, position)


class Aliases(Step):
    """Casts that change nothing are the cache itself, contiguous copies of it are not."""

    def append(self, k, v, position):
        same, before = self.keys.to(k.dtype), self.keys.transpose(0, 1).contiguous()
        same.index_copy_(1, position, k.transpose(0, 1))
        self.values.index_copy_(1, position, v.transpose(0, 1))
        return self.keys + 0 * before.transpose(0, 1), self.values


class FusedProjection(Step):
    """q, k and v from chunked and split products, with a lifted constant and a split head."""

    def forward(self, token, position):
        x = self.embed(token) * torch.tensor(WIDTH**0.5, dtype=torch.float64)
        weight = torch.cat((self.q.weight, self.k.weight, self.v.weight))
        q, k, v = torch.split(F.linear(self.norm(x), weight), [HEADS * HEAD, KV * HEAD, KV * HEAD], dim=-1)
        keys, values = self.append(self.rope(k.unflatten(-1, (KV, HEAD)), position), v.unflatten(-1, (KV, HEAD)), position)
        mixed = self.attend(self.rope(q.unflatten(-1, (HEADS, HEAD)), position), keys, values, position)
        gate, up = self.o(mixed.flatten(1)).chunk(2, dim=-1)
        return 30.0 * torch.tanh(torch.cat((F.silu(gate), F.gelu(up)), -1) @ self.embed.weight.t() / 30.0)


class OverwrittenBuffer(Step):
    """A buffer that is written whole before anybody reads it is no state."""

    def make_caches(self):
        super().make_caches()
        self.register_buffer("shift", torch.full((1, HEAD), 7.0), persistent=False)

    def rope(self, x, position):
        self.shift.copy_(torch.arange(HEAD, dtype=torch.float32))
        self.seen = position  # remembers a traced value
        return rotate_half(x + self.shift, position)


STYLES = [
    Step, IndexAssignment, OneStackedCache, ViewBeforeWrite, WholeCopy, ComplexRope, ExplicitSoftmax, ExpandedGroups,
    NoGradInside, Aliases, FusedProjection, OverwrittenBuffer,
]  # fmt: skip


def weights_of(module):
    return MappedWeights({name: to_numpy(parameter) for name, parameter in module.named_parameters()})


def torch_logits(module, tokens):
    module.eval()
    with torch.no_grad():
        return module(torch.tensor(tokens), torch.arange(len(tokens))).double().numpy()


@pytest.mark.parametrize("style", STYLES)
def test_graph_computes_what_torch_computes(style):
    torch.manual_seed(1)
    module = style()
    graph = verify(trace(module, tokens=3))
    tokens = [3, 1, 4, 1, 5, 9, 2]  # two full steps and one that is filled up
    got = run_sequence(graph, tokens, weights_of(module))
    np.testing.assert_allclose(got, torch_logits(module, tokens), rtol=0, atol=1e-9)


def test_a_buffer_written_before_it_is_read_is_no_cache_and_nothing_traced_is_remembered():
    module = OverwrittenBuffer()
    graph = trace(module)
    assert sorted(graph.meta["caches"]) == ["keys", "values"] and len(graph.effects) == 2
    assert not hasattr(module, "seen")
    assert (module.shift == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_faithful_mode_rounds_as_torch_does(dtype):
    torch.manual_seed(2)
    module = Step(dtype)
    graph = verify(trace(module, tokens=2))
    got = run_sequence(graph, [3, 1, 4, 1], weights_of(module), mode="faithful")
    assert got.dtype == graph[graph.outputs[0]].type.numpy_dtype
    scale = np.abs(want := torch_logits(module, [3, 1, 4, 1])).max()
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=scale * torch.finfo(dtype).eps * 4)


def test_graph_is_functional_and_knows_its_origin():
    graph = trace(Step(), tokens=2)
    assert not [node.op for node in graph if node.op.endswith("_") and not node.op.endswith("__")]
    assert graph.meta["capacity"] == CAPACITY and graph.meta["vocab"] == VOCAB and graph.meta["tokens"] == 2
    assert set(graph.meta["caches"]) == {"keys", "values"} and len(graph.effects) == 2
    linear = next(node for node in graph if node.op == "aten.linear")
    assert linear.source.endswith("self.v(y).view(-1, KV, HEAD)") and __file__ in linear.source
    assert linear.module == "q"
    write = next(node for node in graph if node.op == "aten.index_copy")
    assert write.source.endswith("self.keys.index_copy_(1, position, k.transpose(0, 1))")  # inside a helper method
    # Tied parameters are one weight.
    assert sorted(node.attrs["key"] for node in graph if node.op == "weight") == [
        "embed.weight", "k.weight", "norm.weight", "o.weight", "q.bias", "q.weight", "v.weight",
    ]  # fmt: skip


def test_module_is_left_as_it_was():
    module = Step()
    module.drop.eval()
    before = {name: (value, value.clone()) for name, value in (*module.named_parameters(), *module.named_buffers())}
    trace(module)
    assert module.training and not module.drop.training
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        assert value is before[name][0]
        assert torch.equal(value, before[name][1])


def test_meta_parameters_and_caches_need_no_memory():
    with torch.device("meta"):
        module = Step()
    assert trace(module).meta == trace(Step()).meta
    assert all(tensor.is_meta for tensor in module.state_dict().values())


class NoPosition(Step):
    def forward(self, token, position):
        return super().forward(token, torch.arange(4))


class ReadsPosition(Step):
    def append(self, k, v, position):
        at = int(position[0])
        self.keys[:, at : at + 4] = k.transpose(0, 1)
        return self.keys, self.values


class NoCache(Step):
    def append(self, k, v, position):
        index = position + torch.zeros_like(position)
        return (torch.zeros(KV, CAPACITY, HEAD).index_copy(1, index, x.transpose(0, 1).float()).double() for x in (k, v))


class AttributeCache(Step):
    def make_caches(self):
        self.keys, self.values = torch.zeros(KV, CAPACITY, HEAD).double(), torch.zeros(KV, CAPACITY, HEAD).double()


class OneArgument(nn.Module):
    def forward(self, token):
        return token


class Batched(Step):
    def forward(self, token, position):
        return super().forward(token, position)[None]


class Autocast(Step):
    def rope(self, x, position):
        with torch.autocast("cpu"):
            return rotate_half(x, position)


class Branch(Step):
    def rope(self, x, position):
        return torch.cond(position[0] > 3, lambda x: x + 1, lambda x: x - 1, (x,))


class WritesThroughChunk(Step):
    def append(self, k, v, position):
        self.keys.chunk(2, dim=0)[1].zero_()
        return super().append(k, v, position)


class TwoResults(Step):
    def forward(self, token, position):
        logits = super().forward(token, position)
        return logits, logits.argmax(-1)


class WritesWeight(Step):
    def rope(self, x, position):
        self.q.bias.zero_()
        return x


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (NoPosition, "does not depend on position"),
        (ReadsPosition, r"torch.export cannot trace ReadsPosition.*\(at .*test_trace.py:\d+: .*must not read tensor values"),
        (NoCache, "writes no KV cache"),
        (AttributeCache, "keys, which is not a buffer; register KV caches with register_buffer"),
        (OneArgument, r"forward\(token\) cannot be called with \(token, position\)"),
        (Batched, r"returns fp64\[1, 4, 19\] for T = 4, expected float logits"),
        (Autocast, "runs under autocast"),
        (Branch, "uses cond"),
        (WritesThroughChunk, r"writes in place through getitem, which is not supported \(at .*zero_"),
        (TwoResults, "returns 2 values"),
        (WritesWeight, r"writes its weight q.bias in place \(at .*test_trace.py"),
    ],
)
def test_broken_contract_is_one_clear_line(module, message):
    with pytest.raises(FrontendError, match=message) as caught:
        trace(module())
    assert "\n" not in str(caught.value)
