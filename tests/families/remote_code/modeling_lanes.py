"""What a model's authors would ship: a Laneformer for Transformers that shares no line with kogc's reference module."""

import math

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_lanes import LanesConfig


class PerLane(nn.Module):
    def __init__(self, lanes, outputs, inputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(lanes, outputs, inputs))

    def forward(self, x):  # [B, T, L, K] -> [B, T, L, N]
        return torch.matmul(self.weight, x.unsqueeze(-1)).squeeze(-1)


class Norm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def turned(x, angles):  # [B, T, H, D]: neighbouring pairs
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.lanes = layer, config.num_lanes
        self.head = config.hidden_size // config.num_attention_heads
        self.groups = config.num_attention_heads // config.num_key_value_heads
        query, key = (heads * self.head // self.lanes for heads in (config.num_attention_heads, config.num_key_value_heads))
        self.wq = PerLane(self.lanes, query, config.hidden_size)
        self.wk = PerLane(self.lanes, key, config.hidden_size)
        self.wv = PerLane(self.lanes, key, config.hidden_size)
        self.wo = PerLane(self.lanes, config.hidden_size, query)

    def forward(self, x, angles, mask, cache):
        batch, tokens = x.shape[:2]
        query, key, value = (part(x).reshape(batch, tokens, -1, self.head) for part in (self.wq, self.wk, self.wv))
        query, key, value = turned(query, angles).transpose(1, 2), turned(key, angles).transpose(1, 2), value.transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        key, value = key.repeat_interleave(self.groups, 1), value.repeat_interleave(self.groups, 1)
        scores = query @ key.transpose(-1, -2) * self.head**-0.5 + mask
        mixed = scores.float().softmax(-1).to(x.dtype) @ value
        return self.wo(mixed.transpose(1, 2).reshape(batch, tokens, self.lanes, -1))


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        inner = config.intermediate_size // config.num_lanes
        self.w1 = PerLane(config.num_lanes, inner, config.hidden_size)
        self.w2 = PerLane(config.num_lanes, config.hidden_size, inner)
        self.w3 = PerLane(config.num_lanes, inner, config.hidden_size)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attention_norm, self.attention = Norm(config.hidden_size, config.norm_eps), Attention(config, layer)
        self.ffn_norm, self.feed_forward = Norm(config.hidden_size, config.norm_eps), FeedForward(config)


class Trunk(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.norm_eps)


class LanesForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = LanesConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.tok_embeddings

    def _delayed(self, outputs):
        """What the newest of ``outputs`` adds to every lane: the other lanes' part comes late."""
        layer, delay, own = len(outputs) - 1, self.config.broadcast_delay, outputs[-1]
        if layer < delay:
            return own.sum(2, keepdim=True) if self.config.use_early_comm else math.sqrt(self.config.num_lanes) * own
        past = outputs[layer - delay]
        return own + past.sum(2, keepdim=True) - past

    def forward(self, input_ids, position_ids=None, past_key_values=None, use_cache=True, **_):
        config = self.config
        hidden = self.model.tok_embeddings(input_ids)
        facts = {"config": config, "inputs_embeds": hidden, "attention_mask": None, "cache": past_key_values, "position_ids": position_ids}
        full, windowed = create_causal_mask(**facts), create_sliding_window_causal_mask(**facts)
        steps = torch.arange(0, config.hidden_size // config.num_attention_heads, 2, dtype=torch.float64) * config.num_attention_heads / config.hidden_size
        angles = (position_ids[..., None].double() * config.rope_theta**-steps)[:, :, None]
        x = hidden[:, :, None].expand(-1, -1, config.num_lanes, -1)
        attended, fed = [], []
        for number, layer in enumerate(self.model.layers):
            mask = windowed if number in config.swa_layers else full
            attended.append(layer.attention(layer.attention_norm(x), angles, mask, past_key_values))
            x = x + self._delayed(attended)
            fed.append(layer.feed_forward(layer.ffn_norm(x)))
            x = x + self._delayed(fed)
        logits = self.lm_head(self.model.norm(x).mean(2))
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)
