"""Models that are no decoder steps for us: every error names the op, the reason and the user's line."""


import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kogc.frontend.trace import trace
from kogc.ir.passes.recognize import UnrecognizedOp, recognize

CAPACITY, VOCAB, HIDDEN, HEADS, KV, SIZE = 12, 20, 16, 4, 2, 4


class Step(nn.Module):
    """A one-layer decoder whose methods the tests replace."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.qkv, self.o = nn.Linear(HIDDEN, (HEADS + 2 * KV) * SIZE), nn.Linear(HEADS * SIZE, HIDDEN)
        self.fc, self.proj = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)
        self.vector = nn.Parameter(torch.rand(HIDDEN))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(KV, CAPACITY, SIZE))
        self.register_buffer("angles", torch.outer(torch.arange(CAPACITY), 0.7 ** torch.arange(SIZE // 2)))

    def mask(self, position):
        return position[:, None] >= torch.arange(CAPACITY)

    def turn(self, x, position):
        return x

    def norm(self, x):
        return F.rms_norm(x, (HIDDEN,))

    def act(self, x):
        return F.relu(x)

    def attend(self, q, position):
        return F.scaled_dot_product_attention(q, self.keys, self.values, self.mask(position), enable_gqa=True)

    def attention(self, x, position):
        q, k, v = (t.unflatten(-1, (-1, SIZE)).transpose(0, 1) for t in self.qkv(x).split([HEADS * SIZE, KV * SIZE, KV * SIZE], -1))
        self.keys.index_copy_(1, position, self.turn(k, position))
        self.values.index_copy_(1, position, v)
        return self.o(self.attend(self.turn(q, position), position).transpose(0, 1).flatten(1))

    def logits(self, x):
        return self.head(x)

    def forward(self, token, position):
        x = self.embed(token)
        x = x + self.attention(self.norm(x), position)
        return self.logits(x + self.proj(self.act(self.fc(self.norm(x)))))


class AttendsWithoutMask(Step):
    def mask(self, position):
        return None


class Causal(Step):
    def attend(self, q, position):
        return F.scaled_dot_product_attention(q, self.keys, self.values, is_causal=True, enable_gqa=True)


class Alibi(Step):
    def mask(self, position):
        age = position[:, None] - torch.arange(CAPACITY)
        return torch.where(age >= 0, -0.5 * age.float(), float("-inf"))


class Bidirectional(Step):
    def mask(self, position):
        return (position[:, None] - torch.arange(CAPACITY)).abs() < 3


class MaskPerHead(Step):
    def mask(self, position):
        age = position[:, None] - torch.arange(CAPACITY)
        return (age >= 0) & (age < torch.arange(3, 3 + HEADS)[:, None, None])


class RepeatedHeads(Step):
    def attend(self, q, position):
        keys, values = (t.repeat(HEADS // KV, 1, 1) for t in (self.keys, self.values))
        return F.scaled_dot_product_attention(q, keys, values, self.mask(position))


class NoCacheRead(Step):
    def attend(self, q, position):
        return torch.softmax(q @ q.transpose(-1, -2), -1) @ q


class ScaledHalf(Step):
    """Turns by the angles, then stretches by the position: no rotation."""

    def turn(self, x, position):
        cos, sin = self.angles[position].cos(), self.angles[position].sin()
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos - first * sin], -1)


class AnglesPerHead(Step):
    def turn(self, x, position):
        angle = self.angles[position] * torch.arange(1, x.shape[0] + 1)[:, None, None]
        first, second = x.chunk(2, -1)
        return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


class Elsewhere(Step):
    def attention(self, x, position):
        return super().attention(x, (position + 1) % CAPACITY)


class Exponential(Step):
    def act(self, x):
        return torch.exp(x)


class LastToken(Step):
    def logits(self, x):
        return self.head(x[-1:]).expand(len(x), -1)


class Mixture(Step):
    def act(self, x):
        return x * torch.softmax(x, -1)


class LayerScale(Step):
    def norm(self, x):
        return x * self.vector


class PerHead(Step):
    def logits(self, x):
        return torch.einsum("tha,va->tv", x.unflatten(-1, (4, 4)), self.head.weight[:, :4])


class Transposed(Step):
    def logits(self, x):
        return self.head(x + x.unflatten(-1, (4, 4)).transpose(-1, -2).flatten(-2))


class Sorted(Step):
    def logits(self, x):
        return torch.sort(self.head(x)).values


class Shifted(Step):
    def forward(self, token, position):
        return super().forward((token + 1) % VOCAB, position)


class StaleCache(Step):
    def attention(self, x, position):
        keys = self.keys.clone()
        y = super().attention(x, position)
        query = x.unflatten(-1, (-1, SIZE)).transpose(0, 1)
        late = F.scaled_dot_product_attention(query, keys, keys, self.mask(position), enable_gqa=True)
        return y + self.o(late.transpose(0, 1).flatten(1))


class HalvedProbabilities(Step):
    def attend(self, q, position):
        keys, values = (t.repeat_interleave(HEADS // KV, 0) for t in (self.keys, self.values))
        scores = (q @ keys.mT).masked_fill(~self.mask(position), float("-inf"))
        return (scores.softmax(-1) * 0.5) @ values


class FirstQuery(Step):
    """Every token attends with the first token's scores."""

    def attend(self, q, position):
        keys, values = (t.repeat_interleave(HEADS // KV, 0) for t in (self.keys, self.values))
        scores = (q @ keys.mT).masked_fill(~self.mask(position), float("-inf"))
        return (scores.softmax(-1)[:, :1] @ values).expand(-1, q.shape[1], -1)


class OneMinusWeight(Step):
    def norm(self, x):
        return F.rms_norm(x, (HIDDEN,)) * (1 - self.vector)


class LayerNormPlusOne(Step):
    def norm(self, x):
        return F.layer_norm(x, (HIDDEN,), self.vector + 1)


class ActiveDropout(Step):
    def act(self, x):
        return F.dropout(F.relu(x), 0.5)


class FirstToken(Step):
    def forward(self, token, position):
        return super().forward(token[:1].expand(4), position)


class TurnedTokens(Step):
    def logits(self, x):
        return self.head(x.flip(0))


class DynamicAngles(Step):
    """Angles that depend on the longest position of the step."""

    def turn(self, x, position):
        angle = self.angles[position] / (1 + position.max())
        first, second = x.chunk(2, -1)
        return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


class OneHeadOnly(Step):
    def attend(self, q, position):
        keys, values = (t[1:].expand(HEADS, -1, -1) for t in (self.keys, self.values))
        return F.scaled_dot_product_attention(q, keys, values, self.mask(position))


CASES = {
    StaleCache: "before the step's own keys and values are written",
    HalvedProbabilities: "changed after the softmax",
    FirstQuery: "other than all tokens",
    OneMinusWeight: "a number and a weight are added",
    LayerNormPlusOne: "a number is added to a weight of layer_norm",
    ActiveDropout: "dropout is active",
    FirstToken: "part of the step's tokens",
    TurnedTokens: "no view of it",
    DynamicAngles: "all positions of a step together",
    OneHeadOnly: "a part of a KV cache",
    AttendsWithoutMask: "attention without a mask",
    Causal: "is_causal aligns queries with the first slots",
    Alibi: "position bias such as ALiBi",
    Bidirectional: "neither causal nor a causal window",
    MaskPerHead: "differs between heads",
    RepeatedHeads: "repeated instead of interleaved",
    NoCacheRead: "read its keys and values from a KV cache",
    ScaledHalf: "no rotary embedding",
    AnglesPerHead: "no rotary embedding",
    Elsewhere: "other than the step's positions",
    Exponential: "function outside of norms and known activation functions",
    LastToken: "part of the step's tokens",
    Mixture: "softmax of something that is not attention scores",
    LayerScale: "weight vector outside of a norm",
    PerHead: "sums over a dimension that only one operand has",
    Transposed: "different arrangements",
    Sorted: "no rule for this op",
    Shifted: "token ids and a number are added|a number and token ids are added",
}


@pytest.mark.parametrize("model", CASES, ids=lambda c: c.__name__)
def test_errors(model):
    torch.manual_seed(0)
    graph = trace(model().double().eval())
    with pytest.raises(UnrecognizedOp, match=CASES[model]) as caught:
        recognize(graph)
    message = str(caught.value)
    assert "\n" not in message and "cannot recognise" in message
    assert "test_recognize_errors.py:" in message


def test_the_plain_step_is_fine():
    assert recognize(trace(Step().double().eval())).level == "decode"


def test_one_traced_token_is_refused():
    with pytest.raises(UnrecognizedOp, match="at least 2 tokens"):
        recognize(trace(Step().double().eval(), tokens=1))
