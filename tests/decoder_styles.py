"""Hand-written decoders in the styles that such code is written in, tiny and in fp64."""

import math

import torch
import torch.nn.functional as F
from torch import nn

CAPACITY, VOCAB, HIDDEN, HEADS, KV, SIZE, INNER = 20, 40, 24, 6, 2, 8, 36


def frequencies(dim: int = SIZE, theta: float = 10000.0) -> torch.Tensor:
    return theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def angles(dim: int = SIZE, theta: float = 10000.0) -> torch.Tensor:
    return torch.outer(torch.arange(CAPACITY, dtype=torch.float64), frequencies(dim, theta))


class RMSNorm(nn.Module):
    def __init__(self, size=HIDDEN, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, INNER, bias=False), nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Decoder(nn.Module):
    """Embedding, ``layers`` of (norm, attention, norm, MLP), norm, head; parts are replaced by the styles below."""

    norm, mlp, attention, layers = RMSNorm, SwiGLU, None, 2

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"n1": self.norm(), "attention": self.attention(), "n2": self.norm(), "mlp": self.mlp()}) for _ in range(self.layers)
        )
        self.final, self.head = self.norm(), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.double()

    def forward(self, token, position):
        x = self.embed(token)
        for block in self.blocks:
            x = x + block["attention"](block["n1"](x), position)
            x = x + block["mlp"](block["n2"](x))
        return self.head(self.final(x))


def decoder(attention: type, **parts) -> nn.Module:
    return type(attention.__name__ + "Decoder", (Decoder,), {"attention": attention, **parts})()


class Attention(nn.Module):
    """Separate projections and caches [KV, capacity, size]."""

    bias = False
    cache_shape = (KV, CAPACITY, SIZE)

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(HIDDEN, HEADS * SIZE, bias=self.bias)
        self.k, self.v = nn.Linear(HIDDEN, KV * SIZE, bias=self.bias), nn.Linear(HIDDEN, KV * SIZE, bias=self.bias)
        self.o = nn.Linear(HEADS * SIZE, HIDDEN, bias=self.bias)
        self.make_buffers()

    def make_buffers(self):
        self.register_buffer("keys", torch.zeros(self.cache_shape))
        self.register_buffer("values", torch.zeros(self.cache_shape))

    def visible(self, position):
        return position[:, None] >= torch.arange(CAPACITY)

    def project(self, x):
        return (f(x).view(len(x), -1, SIZE) for f in (self.q, self.k, self.v))


class GptFast(Attention):
    """Fused wqkv with split, batch dimension, stacked pairs, cache by index, mask by table lookup, repeat_interleave."""

    def __init__(self):
        nn.Module.__init__(self)
        self.wqkv = nn.Linear(HIDDEN, (HEADS + 2 * KV) * SIZE, bias=False)
        self.wo = nn.Linear(HEADS * SIZE, HIDDEN, bias=False)
        self.cache_shape = (1, KV, CAPACITY, SIZE)
        self.make_buffers()
        self.register_buffer("freqs", torch.stack([angles().cos(), angles().sin()], -1))
        self.register_buffer("causal", torch.tril(torch.ones(CAPACITY, CAPACITY, dtype=torch.bool)))

    @staticmethod
    def turn(x, freqs):
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        freqs = freqs.view(1, pairs.size(1), 1, pairs.size(3), 2)
        turned = torch.stack([
            pairs[..., 0] * freqs[..., 0] - pairs[..., 1] * freqs[..., 1],
            pairs[..., 1] * freqs[..., 0] + pairs[..., 0] * freqs[..., 1],
        ], -1)  # fmt: skip
        return turned.flatten(3).type_as(x)

    def forward(self, x, position):
        x, freqs, mask = x[None], self.freqs[position], self.causal[None, None, position]
        batch, length, _ = x.shape
        q, k, v = self.wqkv(x).split([HEADS * SIZE, KV * SIZE, KV * SIZE], dim=-1)
        q, k, v = q.view(batch, length, HEADS, SIZE), k.view(batch, length, KV, SIZE), v.view(batch, length, KV, SIZE)
        q, k = self.turn(q, freqs), self.turn(k, freqs)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        self.keys[:, :, position] = k
        self.values[:, :, position] = v
        keys = self.keys.repeat_interleave(HEADS // KV, dim=1)
        values = self.values.repeat_interleave(HEADS // KV, dim=1)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, dropout_p=0.0)
        return self.wo(y.transpose(1, 2).contiguous().view(batch, length, HEADS * SIZE))[0]


class HuggingFace(Attention):
    """Rotate-half with computed angles, repeat_kv by expand and reshape, additive mask, softmax in fp32."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", frequencies().double())

    def rotary(self, position):
        inv_freq = self.inv_freq[None, :, None].expand(1, -1, 1)
        freqs = (inv_freq @ position[None, None, :].double()).transpose(1, 2)
        both = torch.cat((freqs, freqs), dim=-1)
        return both.cos(), both.sin()

    @staticmethod
    def rotate_half(x):
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)

    @staticmethod
    def repeat_kv(x, times):
        batch, heads, length, size = x.shape
        return x[:, :, None].expand(batch, heads, times, length, size).reshape(batch, heads * times, length, size)

    def mask(self, position):
        hidden = torch.arange(CAPACITY)[None, :] > position[:, None]
        return torch.zeros(len(position), CAPACITY).double().masked_fill(hidden, torch.finfo(torch.float32).min)[None, None]

    def forward(self, x, position):
        x = x[None]
        q, k, v = (f(x).view(1, x.shape[1], -1, SIZE).transpose(1, 2) for f in (self.q, self.k, self.v))
        cos, sin = (t.unsqueeze(1) for t in self.rotary(position))
        q, k = (t * cos + self.rotate_half(t) * sin for t in (q, k))
        self.keys.index_copy_(1, position, k[0])
        self.values.index_copy_(1, position, v[0])
        keys, values = (self.repeat_kv(t[None], HEADS // KV) for t in (self.keys, self.values))
        weights = torch.matmul(q, keys.transpose(2, 3)) * SIZE**-0.5 + self.mask(position)
        weights = F.dropout(F.softmax(weights, dim=-1, dtype=torch.float64).to(q.dtype), p=0.1, training=self.training)
        y = torch.matmul(weights, values).transpose(1, 2).contiguous()
        return self.o(y.reshape(1, x.shape[1], -1).contiguous())[0]


class GroupedEinsum(Attention):
    """Grouped einsums, masked_fill with -inf, pre-scaled query, complex rope by polar, cache [1, capacity, KV, size]."""

    cache_shape = (1, CAPACITY, KV, SIZE)

    def turn(self, x, position):
        turn = torch.polar(torch.ones(CAPACITY, SIZE // 2).double(), angles())[position]
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turn[:, None]).flatten(-2)

    def forward(self, x, position):
        q, k, v = self.project(x)
        q, k = self.turn(q, position) / math.sqrt(SIZE), self.turn(k, position)
        self.keys[0, position] = k
        self.values[0].index_copy_(0, position, v)
        grouped = q.view(len(x), KV, HEADS // KV, SIZE)
        scores = torch.einsum("tgrd,sgd->grts", grouped, self.keys[0])
        weights = scores.masked_fill(~self.visible(position), float("-inf")).softmax(-1)
        return self.o(torch.einsum("grts,sgd->tgrd", weights, self.values[0]).reshape(len(x), -1))


class SlicedPairs(Attention):
    """Even and odd slices, stack and flatten, where-mask with a window, biases, GQA by enable_gqa without batch."""

    bias = True

    def forward(self, x, position):
        q, k, v = self.project(x)
        cos, sin = (t[position][:, None].to(x.dtype) for t in (angles().cos(), angles().sin()))
        even, odd = q[..., ::2], q[..., 1::2]
        q = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
        even, odd = k[..., ::2], k[..., 1::2]
        k = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
        self.keys[:, position] = k.transpose(0, 1)
        self.values[:, position] = v.transpose(0, 1)
        age = position[:, None] - torch.arange(CAPACITY)
        mask = torch.where((age >= 0) & (age < 6), 0.0, float("-inf")).double()
        y = F.scaled_dot_product_attention(q.transpose(0, 1), self.keys, self.values, attn_mask=mask, scale=0.25, enable_gqa=True)
        return self.o(y.transpose(0, 1).flatten(1))


class MatmulWeights(Attention):
    """Weights stored [in, out] and multiplied with @, soft-capped scores, partial rotary, query heads over [KV, G]."""

    def __init__(self):
        nn.Module.__init__(self)
        shapes = {"wq": (HIDDEN, HEADS * SIZE), "wk": (HIDDEN, KV * SIZE), "wv": (HIDDEN, KV * SIZE), "wo": (HEADS * SIZE, HIDDEN)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) * 0.3))
        self.make_buffers()

    @staticmethod
    def turn(x, position):
        part, rest = x.split([4, SIZE - 4], dim=-1)
        cos, sin = (f(angles(4))[position].unsqueeze(1) for f in (torch.cos, torch.sin))
        first, second = part.chunk(2, -1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos, rest], -1)

    def forward(self, x, position):
        q, k, v = ((x @ w).unflatten(-1, (-1, SIZE)) for w in (self.wq, self.wk, self.wv))
        q, k = self.turn(q, position), self.turn(k, position)
        self.keys.index_copy_(1, position, k.permute(1, 0, 2))
        self.values.index_copy_(1, position, v.permute(1, 0, 2))
        q = q.permute(1, 0, 2).reshape(KV, HEADS // KV, len(x), SIZE)
        scores = torch.tanh(q @ self.keys[:, None].mT / math.sqrt(SIZE) / 30.0) * 30.0
        scores = torch.where(self.visible(position), scores, -1e9)
        y = torch.softmax(scores, -1) @ self.values.unsqueeze(1)
        return torch.mm(y.flatten(0, 1).transpose(0, 1).reshape(len(x), -1), self.wo)


class QueryChunks(GptFast):
    """One fused projection for a single key/value head, chunked by slicing; attention without rope."""

    def __init__(self):
        nn.Module.__init__(self)
        self.wqkv = nn.Linear(HIDDEN, (HEADS + 2) * SIZE)
        self.wo = nn.Linear(HEADS * SIZE, HIDDEN)
        self.cache_shape = (1, CAPACITY, SIZE)
        self.make_buffers()

    def forward(self, x, position):
        qkv = self.wqkv(x)
        q = qkv[:, : HEADS * SIZE].view(-1, HEADS, SIZE).transpose(0, 1)
        k, v = qkv[:, HEADS * SIZE : -SIZE], qkv[:, -SIZE:]
        self.keys.index_copy_(1, position, k[None])
        self.values.index_copy_(1, position, v[None])
        y = F.scaled_dot_product_attention(q, self.keys.expand(HEADS, -1, -1), self.values.expand(HEADS, -1, -1), self.visible(position))
        return self.wo(y.transpose(0, 1).flatten(1))


class Conv1dFused(GptFast):
    """GPT-2's c_attn: a weight [in, 3 · out] by addmm, split, with biases; keys and values as many as queries."""

    def __init__(self):
        nn.Module.__init__(self)
        self.wqkv, self.bqkv = nn.Parameter(torch.randn(HIDDEN, 3 * HEADS * SIZE) * 0.2), nn.Parameter(torch.randn(3 * HEADS * SIZE))
        self.wo = nn.Linear(HEADS * SIZE, HIDDEN)
        self.cache_shape = (1, HEADS, CAPACITY, SIZE)
        self.make_buffers()

    def forward(self, x, position):
        x = x[None]
        qkv = torch.addmm(self.bqkv, x.view(-1, HIDDEN), self.wqkv).view(1, x.shape[1], -1)
        q, k, v = (t.view(1, -1, HEADS, SIZE).transpose(1, 2) for t in qkv.split(HEADS * SIZE, dim=2))
        self.keys[:, :, position], self.values[:, :, position] = k, v
        y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=self.visible(position))
        return self.wo(y.transpose(1, 2).reshape(1, -1, HEADS * SIZE))[0]


class Olmo2(HuggingFace):
    """Norms over the whole width of queries and keys, before rope; every second layer another theta or none."""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = RMSNorm(HEADS * SIZE), RMSNorm(KV * SIZE)
        self.q, self.k = nn.Sequential(self.q, self.q_norm), nn.Sequential(self.k, self.k_norm)


class HeadNorm(RMSNorm):
    """A norm over every head on its own, with one scale for all."""

    def __init__(self):
        super().__init__(SIZE)

    def forward(self, x):
        return super().forward(x.view(*x.shape[:-1], -1, SIZE)).flatten(-2)


class QKNorm(HuggingFace):
    """Norms over every head of queries and keys, as Qwen 3 has them."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Sequential(self.q, HeadNorm()), nn.Sequential(self.k, HeadNorm())


class OwnNorms(nn.Module):
    """A LayerNorm of its own for every head, one after the other, as StableLM 2 has them."""

    def __init__(self, heads):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(SIZE, bias=False) for _ in range(heads))
        for norm in self.norms:
            nn.init.uniform_(norm.weight, 0.5, 1.5)

    def forward(self, x):
        heads = x.view(*x.shape[:-1], -1, SIZE).split(1, dim=-2)
        return torch.cat([norm(head) for norm, head in zip(self.norms, heads, strict=True)], dim=-2).flatten(-2)


class NormsOfEveryHead(HuggingFace):
    bias = True

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Sequential(self.q, OwnNorms(HEADS)), nn.Sequential(self.k, OwnNorms(KV))


class HeadByHead(HuggingFace):
    """One linear whose rows are query, key and value of the first head, then of the second, as GPT-NeoX has them."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HEADS * SIZE)
        del self.q, self.k, self.v
        self.register_buffer("keys", torch.zeros(1, HEADS, CAPACITY, SIZE))
        self.register_buffer("values", torch.zeros(1, HEADS, CAPACITY, SIZE))

    def forward(self, x, position):
        parts = self.qkv(x[None]).view(1, len(x), HEADS, 3 * SIZE).transpose(1, 2).chunk(3, dim=-1)
        cos, sin = (t.unsqueeze(1) for t in self.rotary(position))
        q, k = (part * cos + self.rotate_half(part) * sin for part in parts[:2])
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, parts[2])
        y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=self.visible(position)[None, None])
        return self.o(y.transpose(1, 2).reshape(len(x), -1))


class Gemma3(HuggingFace):
    count = 0

    def __init__(self):
        super().__init__()
        Gemma3.count += 1
        self.inv_freq = frequencies(theta=10000.0 if Gemma3.count % 2 else 1e6)
