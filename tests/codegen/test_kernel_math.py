"""The machine layer's arithmetic: exp, tanh, erfc and the storage dtypes, against numpy."""

import ctypes
import math

import ml_dtypes
import numpy as np
import pytest

from kogc.targets import load_target
from kogc.targets.cpu.toolchain import build

pytestmark = pytest.mark.compiler

KINDS = ["native", "generic"]

HARNESS = """
typedef float storage;
{layer}
#define EACH(name, expression) \\
  extern "C" void name(float* y, const float* x, int n) {{ for (int i = 0; i < n; i += TILE_ROWS) store(y + i, expression(load(x + i))); }}
EACH(f_exp, exp) EACH(f_tanh, tanh) EACH(f_erfc, erfc)
extern "C" void f_sums(float* y, const float* x) {{
  vec v[TILE_ROWS];
  for (int i = 0; i < TILE_ROWS; ++i) v[i] = load(x + i * TILE_ROWS);
  store(y, sums(v));
}}
extern "C" void f_fma(float* y, const float* x) {{ store(y, fma(load(x), load(x + TILE_ROWS), load(x + 2 * TILE_ROWS))); }}
extern "C" int f_any_not_below(const float* x, float limit) {{ return any_not_below(load(x), broadcast(limit)); }}
template <class Stored> static void widen(float* y, const uint16_t* x, int n) {{
  for (int i = 0; i < n; i += TILE_ROWS) store(y + i, load((const Stored*)x + i));
}}
template <class Stored> static void narrow(uint16_t* y, const float* x, int n) {{
  for (int i = 0; i < n; i += TILE_ROWS) store((Stored*)y + i, load(x + i));
}}
extern "C" void widen_fp16(float* y, const uint16_t* x, int n) {{ widen<fp16>(y, x, n); }}
extern "C" void widen_bf16(float* y, const uint16_t* x, int n) {{ widen<bf16>(y, x, n); }}
extern "C" void narrow_fp16(uint16_t* y, const float* x, int n) {{ narrow<fp16>(y, x, n); }}
extern "C" void narrow_bf16(uint16_t* y, const float* x, int n) {{ narrow<bf16>(y, x, n); }}
"""

HALF = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}


@pytest.fixture(scope="module", params=KINDS)
def layer(request):
    target = load_target("cpu", simd=None if request.param == "native" else request.param)
    sizes = f"constexpr int TILE_ROWS = {target.tile_rows};"
    text = "\n".join((*target.machine.before, sizes, HARNESS.format(layer="\n".join(target.machine.layer[:3]))))
    library = ctypes.CDLL(str(build(text)))
    library.tile_rows = target.tile_rows
    return library


def pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


def mapped(function, x, result=np.float32):
    y = np.empty(len(x), result)
    function(pointer(y), pointer(x), len(x))
    return y


def sweep(low, high):
    return np.linspace(low, high, 1 << 16, dtype=np.float32)


def test_exp(layer):
    x = sweep(-87, 87.9)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(mapped(layer.f_exp, x) / exact - 1).max() < 3e-7


def test_exp_at_the_ends(layer):
    x = np.resize(np.float32([-np.inf, -1e30, -88, 0, np.inf, 1e30, np.nan, 89]), 16)
    y = mapped(layer.f_exp, x)
    assert y[:6].tolist() == [0, 0, 0, 1, np.inf, np.inf] and np.isnan(y[6]) and y[7] == np.inf


def test_tanh(layer):
    x = sweep(-20, 20)
    assert np.abs(mapped(layer.f_tanh, x) - np.tanh(x.astype(np.float64))).max() < 2e-7
    small = sweep(1e-6, 0.7)
    assert np.abs(mapped(layer.f_tanh, small) / np.tanh(small.astype(np.float64)) - 1).max() < 4e-7
    ends = mapped(layer.f_tanh, np.resize(np.float32([-np.inf, np.inf, 0, -0.0, -100, 100, np.nan, 1]), 16))
    assert ends[:6].tolist() == [-1, 1, 0, 0, -1, 1] and np.isnan(ends[6])


def test_erfc(layer):
    x = sweep(-6, 6)
    exact = np.array([math.erfc(v) for v in x.tolist()])
    assert np.abs(mapped(layer.f_erfc, x) - exact).max() < 5e-7
    ends = mapped(layer.f_erfc, np.resize(np.float32([-np.inf, np.inf, -30, 30, np.nan, 0, 0, 0]), 16))
    assert ends[:4].tolist() == [2, 0, 2, 0] and np.isnan(ends[4])


@pytest.mark.parametrize("dtype", HALF)
def test_every_half_is_widened_exactly(layer, dtype):
    bits = np.arange(1 << 16, dtype=np.uint16)
    expected = bits.view(HALF[dtype]).astype(np.float32)
    found = mapped(getattr(layer, f"widen_{dtype}"), bits)
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", HALF)
def test_halves_are_rounded_to_nearest_even(layer, dtype):
    bits = np.arange(1 << 16, dtype=np.uint16)
    halves = bits.view(HALF[dtype]).astype(np.float32)
    halves = halves[np.isfinite(halves)]
    between = (halves[:-1].astype(np.float64) + halves[1:]) / 2  # ties, where the two are neighbours
    random = np.random.default_rng(0).standard_normal(1 << 16) * 10.0 ** np.random.default_rng(1).integers(-9, 6, 1 << 16)
    x = np.concatenate([halves, between, random, [np.inf, -np.inf, 65519, 65520, 1e38, -1e-30]]).astype(np.float32)
    x = np.resize(x, -(-len(x) // 16) * 16)
    with np.errstate(over="ignore"):
        expected = x.astype(HALF[dtype])
    found = mapped(getattr(layer, f"narrow_{dtype}"), x, np.uint16).view(HALF[dtype])
    assert np.array_equal(found.view(np.uint16), expected.view(np.uint16))
    nan = np.full(16, np.nan, np.float32)
    assert np.isnan(mapped(getattr(layer, f"narrow_{dtype}"), nan, np.uint16).view(HALF[dtype]).astype(np.float32)).all()


def test_horizontal_sums(layer):
    n = layer.tile_rows
    x = np.random.default_rng(0).standard_normal((n, n)).astype(np.float32)
    y = np.empty(n, np.float32)
    layer.f_sums(pointer(y), pointer(x))
    assert np.allclose(y, x.sum(1), rtol=1e-5, atol=1e-5)


def test_fma(layer):
    x = np.random.default_rng(0).standard_normal((3, layer.tile_rows)).astype(np.float32)
    y = np.empty(layer.tile_rows, np.float32)
    layer.f_fma(pointer(y), pointer(x))
    assert np.allclose(y, x[0] * x[1] + x[2], rtol=1e-6, atol=1e-6)


def test_any_not_below(layer):
    below = np.full(layer.tile_rows, -1, np.float32)
    ask = lambda x: bool(layer.f_any_not_below(pointer(x), ctypes.c_float(0)))
    assert not ask(below)
    for position in range(layer.tile_rows):
        for value in (0, 1, np.inf, np.nan):
            x = below.copy()
            x[position] = value
            assert ask(x)
