"""What both architectures promise: export, meta construction, dtypes, caches, presets."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kogc.models.build import build_model, required_tensors
from kogc.models.presets import PRESETS

TINY = ("llama-tiny", "laneformer-tiny")


def token_and_position(device="cpu"):
    return torch.arange(4, device=device) + 7, torch.arange(4, device=device)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_exports(name, device, dtype):
    with torch.device(device):
        model = build_model(PRESETS[name], 32).to(dtype)

    program = torch.export.export(model, token_and_position(device), strict=False)

    used = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "aten.scaled_dot_product_attention.default" in used
    assert "aten.index_copy_.default" in used


def test_exported_program_computes_the_same():
    model = build_model(PRESETS["laneformer-tiny"], 32)
    program = torch.export.export(model, token_and_position(), strict=False)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(*token_and_position()), model(*token_and_position()))


@pytest.mark.parametrize("name", TINY)
def test_meta_construction_keeps_real_tables(name):
    with torch.device("meta"):
        model = build_model(PRESETS[name], 32)
    tables = list(model.rope.buffers())
    assert all(p.is_meta for p in model.parameters())
    assert all(t.device.type == "cpu" and t.dtype == torch.float32 and len(t) == 32 for t in tables)

    real = build_model(PRESETS[name], 32)
    for table, expected in zip(model.to_empty(device="cpu").rope.buffers(), real.rope.buffers(), strict=True):
        assert torch.equal(table, expected)


@pytest.mark.parametrize("name", TINY)
def test_meta_module_becomes_real_by_loading(name):
    real = build_model(PRESETS[name], 32)
    with torch.device("meta"):
        model = build_model(PRESETS[name], 32)
    model.to_empty(device="cpu")
    model.load_state_dict(real.state_dict())
    assert all(not b.any() for n, b in model.named_buffers() if ".cache." in n)
    with torch.no_grad():
        assert torch.equal(model(*token_and_position()), real(*token_and_position()))


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_keep_fp32_tables_and_stay_close(name, dtype):
    half = build_model(PRESETS[name], 32).to(dtype)
    wide = build_model(PRESETS[name], 32)
    wide.load_state_dict(half.state_dict())

    with torch.no_grad():
        found, expected = half(*token_and_position()), wide(*token_and_position())

    assert found.dtype == dtype
    assert all(t.dtype == torch.float32 for t in half.rope.buffers())
    assert all(b.dtype == dtype for n, b in half.named_buffers() if ".cache." in n)
    error = (found.float() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert error < {torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]


class Float32Watch(TorchDispatchMode):
    """Fails on the first operation that makes a single- or half-precision tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            narrow = (torch.float32, torch.float16, torch.bfloat16, torch.complex64)
            assert not (isinstance(tensor, torch.Tensor) and tensor.dtype in narrow), func
        return out


@pytest.mark.parametrize("name", TINY)
def test_double_module_is_fp64_throughout(name):
    model = build_model(PRESETS[name], 32).double()
    with torch.no_grad(), Float32Watch():
        assert model(*token_and_position()).dtype == torch.float64


@pytest.mark.parametrize("name", TINY)
def test_caches_have_one_row_per_kv_head_and_are_not_saved(name):
    model = build_model(PRESETS[name], 32)
    caches = {n: tuple(b.shape) for n, b in model.named_buffers() if ".cache." in n}
    config = model.config
    assert set(caches.values()) == {(config.num_key_value_heads, 32, config.head_dim)}
    assert len(caches) == 2 * config.num_hidden_layers
    assert set(model.state_dict()) == set(dict(model.named_parameters()))


@pytest.mark.parametrize("name", TINY)
def test_stale_slots_are_not_seen(name):
    """A sequence started anew must not see what an earlier, longer one left in the cache."""
    model = build_model(PRESETS[name], 32)
    token, position = token_and_position()
    with torch.no_grad():
        fresh = model(token, position)
        model(torch.randint(256, (32,)), torch.arange(32))
        assert torch.equal(model(token, position), fresh)


@pytest.mark.parametrize("name", TINY)
def test_capacity_below_one_is_an_error(name):
    with pytest.raises(ValueError, match="capacity is 0"):
        build_model(PRESETS[name], 0)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("laneformer-2b", 2_320_069_632),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-2.3b", 2_362_542_080),
        ("smollm2-135m", 134_515_008),
        ("llama-tiny", 145_856),
        ("laneformer-tiny", 180_800),
    ],
)
def test_preset_parameter_counts(name, parameters):
    assert sum(math.prod(shape) for shape in required_tensors(PRESETS[name]).values()) == parameters


def test_presets_are_all_counted():
    assert len(PRESETS) == 7


def test_required_tensors_of_the_released_shape():
    shapes = required_tensors(PRESETS["laneformer-2b"])
    assert shapes["model.tok_embeddings.weight"] == (32000, 3072)
    assert shapes["model.layers.14.attention.wq.weight"] == (8, 384, 3072)
    assert shapes["model.layers.0.attention.wk.weight"] == (8, 192, 3072)
    assert shapes["model.layers.0.attention.wo.weight"] == (8, 3072, 384)
    assert shapes["model.layers.0.feed_forward.w3.weight"] == (8, 1536, 3072)
    assert shapes["model.layers.0.feed_forward.w2.weight"] == (8, 3072, 1536)
    assert shapes["model.layers.0.ffn_norm.weight"] == (3072,)
    assert shapes["lm_head.weight"] == (32000, 3072)
