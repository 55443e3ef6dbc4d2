"""The kernel's own sampling functions, called by themselves: random numbers, penalties, and every filter's distribution against numpy."""

import ctypes

import numpy as np
import pytest
from kernel_harness import rendered
from program_fixture import llama

from kogc.codegen.launch import IN_PROMPT, Sampling
from kogc.targets.cpu.toolchain import build

pytestmark = pytest.mark.compiler

VOCAB, DRAWS = 53, 200_000

HARNESS = """
extern "C" uint64_t bits(uint64_t key, uint64_t counter) { return random_bits(key, counter); }
extern "C" void draw_many(const float* logits, const kogc_sampling* s, int first, int count, int32_t* out) {
  static Candidate room[VOCAB];
  for (int i = 0; i < count; ++i) out[i] = choose(logits, *s, first + i, room);
}
extern "C" int keep_some(const float* logits, const kogc_sampling* s, int32_t* tokens, uint64_t* mass) {
  static Candidate room[VOCAB];
  Candidates found = candidates_of(logits, s->temperature, room);
  filter(found, *s);
  for (int i = 0; i < found.count; ++i) tokens[i] = token_of(found.all[i]);
  *mass = found.mass;
  return found.count;
}
extern "C" void prepare(const kogc_sampling* s, int32_t fed, int produced, const float* logits, float* out) {
  Worker w = {};
  w.columns = 1, w.token[0] = fed, w.produced = produced;
  for (int row = 0; row < VOCAB; row += TILE_ROWS) {
    const int n = VOCAB - row < TILE_ROWS ? VOCAB - row : TILE_ROWS;
    store_first(out + row, prepared(w, *s, row, n, load_first(logits + row, n)), n);
  }
}
extern "C" void logprobs(const float* logits, int32_t chosen, int n, float* out) { report_logprobs(logits, chosen, n, out); }
"""


@pytest.fixture(scope="module", params=[None, "generic"], ids=["native", "generic"])
def kernel(request):
    library = ctypes.CDLL(str(build(rendered(llama(vocab=VOCAB), simd=request.param).source + HARNESS)))
    library.bits.restype, library.bits.argtypes = ctypes.c_uint64, [ctypes.c_uint64] * 2
    return library


def pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


def params(seed=1, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition=1.0, presence=0.0, frequency=0.0, **arrays):
    return Sampling(
        seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, top_logprobs=-1, repetition_penalty=repetition,
        presence_penalty=presence, frequency_penalty=frequency, **{name: array.ctypes.data for name, array in arrays.items()},
    )  # fmt: skip


def drawn(kernel, logits, how, first=0, count=DRAWS):
    out = np.empty(count, np.int32)
    kernel.draw_many(pointer(logits), ctypes.byref(how), first, count, pointer(out))
    return out


def reference(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities [vocab]: temperature, top-k, top-p of what is left, min-p, plainly."""
    x = logits.astype(np.float64) / temperature
    p = np.exp(x - x.max())
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


def chi_square_score(tokens, p):
    """How many standard deviations (Wilson and Hilferty's approximation) χ² lies above what chance gives."""
    seen, expected = np.bincount(tokens, minlength=len(p)).astype(float), p * len(tokens)
    assert not seen[p == 0].any(), "a token was drawn that the filters leave out"
    rare = expected < 10
    seen, expected = (np.r_[a[~rare], a[rare].sum()] for a in (seen, expected))
    seen, expected = seen[expected > 0], expected[expected > 0]
    freedom = len(seen) - 1
    if freedom == 0:
        return 0.0
    chi = ((seen - expected) ** 2 / expected).sum()
    return ((chi / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5


def some_logits(seed=0, scale=2.0):
    return (np.random.default_rng(seed).standard_normal(VOCAB) * scale).astype(np.float32)


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [(0, 0, (0x6627E8D5, 0xE169C58D)), (0xC0FFEE12345678, 77, None), (2**64 - 1, 2**40 + 5, None)],
)
def test_random_numbers_are_philox(kernel, key, counter, words):
    """The first is a known answer of Random123; the others are computed as the paper writes it."""
    x, k = [counter & 0xFFFFFFFF, counter >> 32, 0, 0], [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [b >> 32 ^ x[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ x[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    assert words is None or tuple(x[:2]) == words
    assert kernel.bits(key, counter) == x[1] << 32 | x[0]


FILTERS = [
    {}, {"temperature": 0.5}, {"temperature": 2.5}, {"top_k": 1}, {"top_k": 7}, {"top_k": 52}, {"top_k": 1000}, {"top_p": 0.5}, {"top_p": 0.9},
    {"top_p": 1e-9}, {"top_p": 0.999}, {"min_p": 0.05}, {"min_p": 1.0}, {"top_k": 20, "top_p": 0.8}, {"top_p": 0.95, "min_p": 0.1},
    {"temperature": 1.7, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
]  # fmt: skip


@pytest.mark.parametrize("how", FILTERS, ids=str)
def test_draws_follow_the_reference(kernel, how):
    logits = some_logits()
    p = reference(logits, **how)
    assert chi_square_score(drawn(kernel, logits, params(seed=42, **how)), p) < 4


def test_the_test_notices_a_wrong_distribution(kernel):
    logits = some_logits()
    tokens = drawn(kernel, logits, params(seed=42))
    assert chi_square_score(tokens, reference(logits, temperature=1.05)) > 10
    assert chi_square_score(tokens[: DRAWS // 2] // 2 * 2, reference(logits) + 1e-12) > 10


@pytest.mark.parametrize("seed", range(40))
def test_what_is_kept_is_what_the_reference_keeps(kernel, seed):
    """Many shapes of logits, ties among them."""
    draw = np.random.default_rng(seed)
    logits = some_logits(seed, draw.uniform(0.1, 6))
    if seed % 3 == 0:
        logits = np.round(logits)
    if seed % 4 == 0:
        logits[draw.integers(0, VOCAB, 9)] = -np.inf
    how = {"temperature": draw.uniform(0.3, 2), "top_k": int(draw.integers(0, VOCAB)), "top_p": draw.uniform(0.05, 1), "min_p": draw.choice([0, 0.03])}
    tokens, mass = np.empty(VOCAB, np.int32), ctypes.c_uint64()
    count = kernel.keep_some(pointer(logits), ctypes.byref(params(**how)), pointer(tokens), ctypes.byref(mass))
    p = reference(logits, **how)
    kept = tokens[:count]
    assert set(kept.tolist()) == set(np.flatnonzero(p > 1e-9).tolist())
    whole = np.exp((logits[kept].astype(float) - logits.max()) / how["temperature"]) * 2**30
    assert abs(mass.value - whole.sum()) <= 1e-6 * whole.sum() + count


def test_seeds_and_positions_draw_independently(kernel):
    logits = some_logits()
    one, again, other = (drawn(kernel, logits, params(seed=seed), count=4000) for seed in (3, 3, 4))
    assert np.array_equal(one, again)
    chance = (reference(logits) ** 2).sum()
    for a, b in ((one, other), (one[:-1], one[1:])):
        assert abs((a == b).mean() - chance) < 5 * (chance / len(a)) ** 0.5
    assert np.array_equal(drawn(kernel, logits, params(seed=3), first=100, count=50), one[100:150]), "the counter is the position"


def test_temperature_zero_takes_the_first_of_the_largest(kernel):
    logits = some_logits()
    logits[[9, 30]] = 8
    assert set(drawn(kernel, logits, params(temperature=0), count=50).tolist()) == {9}


@pytest.mark.parametrize("extreme", [{"temperature": 1e-38}, {"temperature": 1e30}])
def test_extreme_temperatures(kernel, extreme):
    logits = some_logits()
    tokens = drawn(kernel, logits, params(**extreme))
    p = np.eye(VOCAB)[logits.argmax()] if extreme["temperature"] < 1 else np.full(VOCAB, 1 / VOCAB)
    assert chi_square_score(tokens, p) < 4


def test_infinite_logits(kernel):
    logits = some_logits()
    logits[::2] = -np.inf
    assert chi_square_score(drawn(kernel, logits, params()), reference(logits)) < 4
    logits[5] = np.inf
    assert set(drawn(kernel, logits, params(top_p=0.9), count=100).tolist()) == {5}


def test_penalties_and_bias(kernel):
    logits, history, bias = some_logits(), np.zeros(VOCAB, np.uint32), np.zeros(VOCAB, np.float32)
    history[[3, 8, 9]] = IN_PROMPT
    history[[8, 20]] += np.uint32(2)
    bias[[3, 40]] = 1.5, -7
    made = np.zeros(VOCAB)
    made[[8, 20]] = 2
    made[21] = 1  # fed now, so counted now
    seen = (made > 0) | (history > 0)
    expected = np.where(seen, np.where(logits > 0, logits / 1.3, logits * 1.3), logits) - 0.4 * made - 0.9 * (made > 0) + bias
    out = np.empty(VOCAB, np.float32)
    how = params(repetition=1.3, presence=0.9, frequency=0.4, history=history, bias=bias)
    kernel.prepare(ctypes.byref(how), 21, 1, pointer(logits), pointer(out))
    assert history[21] == 1 and np.abs(out - expected).max() < 1e-5
    before = history.copy()
    kernel.prepare(ctypes.byref(how), 21, 0, pointer(logits), pointer(out))
    assert np.array_equal(history, before), "the prompt's last token was counted by the host"


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_log_probabilities(kernel, count):
    for logits in (some_logits(), np.round(some_logits()), np.where(np.arange(VOCAB) % 7 == 0, some_logits(), -np.inf).astype(np.float32)):
        out = np.empty(2 + 2 * count, np.float32)
        kernel.logprobs(pointer(logits), 14, count, pointer(out))
        x = logits.astype(np.float64)
        expected = x - x.max() - np.log(np.exp(x - x.max()).sum())
        order = np.argsort(-expected, kind="stable")[:count]
        assert abs(out[0] - np.log(out[1]) - expected[14]) < 1e-5
        assert out[2 + count :].view(np.int32).tolist() == order.tolist()
        finite = np.isfinite(expected[order])
        assert np.array_equal(np.isfinite(out[2 : 2 + count]), finite)
        assert np.abs(out[2 : 2 + count][finite] - np.log(out[1]) - expected[order][finite]).max(initial=0) < 1e-5
