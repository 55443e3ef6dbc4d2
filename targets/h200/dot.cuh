// Dots of weights with activations. A step is STEP_K weights of each of a tile's eight rows: what one matrix instruction
// (mma.m16n8k16) takes as its A. Rows 0 to 7 of A hold the first half of the step, rows 8 to 15 the second. B has a column for
// each half of the activation in each precision: high part of the first half, of the second, low parts of both. High and
// low part together are the fp32 activation to 16 bits (bf16) or 22 bits (fp16), and weights are never rounded again.

constexpr int STEP_K = 32, STEP_BYTES = TILE_ROWS * STEP_K * sizeof(storage);

// One lane's part of a step: eight weights, four words of the instruction's A (twice as many for fp32 weights: plain FMA).
struct Fragment { uint4 words[sizeof(storage) / 2]; };

DEVICE Fragment load_fragment(uint32_t place) {
  Fragment f;
  UNROLL for (int i = 0; i < (int)sizeof(storage) / 2; ++i) {
    uint4& v = f.words[i];
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(place + 16 * i));
  }
  return f;
}

DEVICE uint2 load_two_words(uint32_t place) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(place));
  return v;
}

// Two activations as two halves of a word; what that leaves of them; and the instruction.
template <class Stored>
struct Pair;
template <>
struct Pair<fp16> {
  DEVICE_MEMBER static uint32_t pack(float2 x) { const __half2 h = __floats2half2_rn(x.x, x.y); return *(const uint32_t*)&h; }
  DEVICE_MEMBER static float2 unpack(uint32_t word) { return __half22float2(*(const __half2*)&word); }
  DEVICE_MEMBER static void multiply(float (&c)[4], uint4 a, uint2 b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
  }
};
template <>
struct Pair<bf16> {
  DEVICE_MEMBER static uint32_t pack(float2 x) { const __nv_bfloat162 h = __floats2bfloat162_rn(x.x, x.y); return *(const uint32_t*)&h; }
  DEVICE_MEMBER static float2 unpack(uint32_t word) { return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000)}; }
  DEVICE_MEMBER static void multiply(float (&c)[4], uint4 a, uint2 b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
  }
};

// ── activations ──

template <int K>
DEVICE float2 load_pair(const float* x, int i) {
  if (K % STEP_K == 0 || i + 1 < K) return *(const float2*)(x + i);
  return {i < K ? x[i] : 0.0f, 0.0f};  // behind the end lies what was there before, perhaps a NaN
}

// This lane's words of B for the step that begins at activation ``first``: column lane / 4 is high or low (columns 2, 3) of
// the first or second half (odd columns). Columns 4 to 7 are zero.
template <int K>
DEVICE uint2 split_activation(const float* x, int first) {
  const int lane = threadIdx.x % 16, column = lane / 4;
  const int at = first + column % 2 * 16 + lane % 4 * 2;
  const float2 low = load_pair<K>(x, at), high = load_pair<K>(x, at + 8);
  const uint2 rounded = {Pair<storage>::pack(low), Pair<storage>::pack(high)};
  if (column < 2) return rounded;
  const float2 a = Pair<storage>::unpack(rounded.x), b = Pair<storage>::unpack(rounded.y);
  return {Pair<storage>::pack({low.x - a.x, low.y - a.y}), Pair<storage>::pack({high.x - b.x, high.y - b.y})};
}

// A vector of K values ready for dots: steps of B, 16 lanes of two words each (as long as the fp32 values themselves); fp32 as
// it is.
template <int K>
struct Activation { const float* x; };

template <int K>
constexpr int UNIT_STEPS = (K + STEP_K - 1) / STEP_K;

// How many warps share the steps of a unit; CONSUMER_WARPS divided by it is how many units are under way at a time. A warp should
// have a few steps of each.
template <int K>
constexpr int SHARING = UNIT_STEPS<K> >= 6 * CONSUMER_WARPS ? CONSUMER_WARPS : UNIT_STEPS<K> >= 24 ? 4 : UNIT_STEPS<K> >= 8 ? 2 : 1;
static_assert(CONSUMER_WARPS == 8, "warps are shared out by powers of two");

// Steps that a warp takes in a row of a unit with ARITY tiles: four pieces of 512 bytes.
template <int ARITY>
constexpr int ROW_STEPS = 4 / ARITY;

// A unit fills whole rows: its last one with zeros.
template <int ARITY, int K>
constexpr int UNIT_BYTES = (UNIT_STEPS<K> + ROW_STEPS<ARITY> - 1) / ROW_STEPS<ARITY> * 4 * STEP_BYTES;

// Half a warp packs a step, and has four under way. ``to`` may be ``x``: a step is read before its place is written.
template <int K>
DEVICE_ONCE void pack_activation(const float* x, float* to) {
  constexpr int AT_ONCE = 4, STRIDE = CONSUMERS / 16;
  const int lane = threadIdx.x % 16;
  ROLLED for (int first = threadIdx.x / 16; first < UNIT_STEPS<K>; first += AT_ONCE * STRIDE) {
    uint2 words[AT_ONCE];
    UNROLL for (int i = 0; i < AT_ONCE; ++i)
      if (first + i * STRIDE < UNIT_STEPS<K>) words[i] = split_activation<K>(x, (first + i * STRIDE) * STEP_K);
    __syncwarp(threadIdx.x % 32 < 16 ? 0xffff : 0xffff0000);
    UNROLL for (int i = 0; i < AT_ONCE; ++i)
      if (first + i * STRIDE < UNIT_STEPS<K>) *(uint2*)(to + (first + i * STRIDE) * STEP_K + lane * 2) = words[i];
  }
}

template <int T, int K>
DEVICE Activation<K> prepare(const Worker& w, const float* x, int, float* to) {
  static_assert(T == 1, "this machine layer takes one token a step");
  if constexpr (sizeof(storage) == 4) {
    return {x};
  } else {
    pack_activation<K>(x, to);
    worker_sync(w);
    return {to};
  }
}

// What a warp gathers of one tile: C of the matrix instruction. Row lane / 4 of the tile is the sum over its columns.
template <class Stored>
struct Dot {
  float c[4] = {};
  DEVICE_MEMBER void add(const Fragment& f, uint2 b) { Pair<Stored>::multiply(c, f.words[0], b); }
  DEVICE_MEMBER float sum() const {  // in lanes 4 · row
    const float mine = c[0] + c[3];
    return mine + __shfl_xor_sync(~0u, mine, 1);
  }
};
// A step's B as one lane reads it: the upper lanes, whose columns are zero, always read the same zeros.
template <class Stored, int K>
struct Reader {
  uint32_t place, stride;
  DEVICE_MEMBER Reader(const float* x) {
    const int lane = threadIdx.x % 32;
    place = lane < 16 ? shared_address(x) + lane * 8 : shared_address(&shared_state().nothing);
    stride = lane < 16 ? STEP_K * 4 : 0;
  }
  DEVICE_MEMBER uint2 at(int step) const { return load_two_words(place + step * stride); }
};

template <>
struct Dot<fp32> {
  float c = 0;
  struct B { float2 pairs[4]; };
  DEVICE_MEMBER void add(const Fragment& f, const B& b) {
    UNROLL for (int i = 0; i < 4; ++i) {
      const uint4 v = f.words[i / 2 % (int)(sizeof(storage) / 2)];
      c = fmaf(__uint_as_float(i % 2 ? v.z : v.x), b.pairs[i].x, c);
      c = fmaf(__uint_as_float(i % 2 ? v.w : v.y), b.pairs[i].y, c);
    }
  }
  DEVICE_MEMBER float sum() const {
    const float two = c + __shfl_xor_sync(~0u, c, 1);
    return two + __shfl_xor_sync(~0u, two, 2);
  }
};
template <int K>
struct Reader<fp32, K> {
  const float* x;
  DEVICE_MEMBER Reader(const float* x) : x(x) {}
  DEVICE_MEMBER Dot<fp32>::B at(int step) const {
    Dot<fp32>::B b;
    UNROLL for (int i = 0; i < 4; ++i) b.pairs[i] = load_pair<K>(x, step * STEP_K + i % 2 * 16 + i / 2 * 8 + threadIdx.x % 4 * 2);
    return b;
  }
};

// ── units ──

// This warp's share of ``units`` units, of which teams of warps take turns, into ``dots`` [units][ARITY][8]. Of a unit, the warps
// of a team take rows of ROW_STEPS steps in turn.
template <int ARITY, int K>
DEVICE_ONCE void dot_units(const float* x, int units, float* dots) {
  constexpr int WARPS = SHARING<K>, TEAMS = CONSUMER_WARPS / WARPS, STEPS = UNIT_STEPS<K>, ROW = ROW_STEPS<ARITY>;
  constexpr int STEP = ARITY * STEP_BYTES, BYTES = UNIT_BYTES<ARITY, K>;
  const int warp = threadIdx.x / 32 % WARPS, team = threadIdx.x / 32 / WARPS, lane = threadIdx.x % 32;
  const uint32_t ring = shared_address(shared_memory + RING_BEGIN) + lane * 8 * sizeof(storage);
  const Reader<storage, K> activation(x);
  Stream s = open_stream();
  ROLLED for (int unit = 0; unit < units; ++unit, dots += ARITY * TILE_ROWS) {
    if (TEAMS > 1 && unit % TEAMS != team) {
      next_unit(s, BYTES);
      continue;
    }
    Dot<storage> tile[ARITY][2];  // two chains, so that an instruction need not wait for the one before
    ROLLED for (int step = warp * ROW; step < STEPS; step += WARPS * ROW) {
      land(s, (step + ROW) * STEP);
      // The ring's length is a multiple of a row's, and so is every unit's: a row does not go around it.
      const uint32_t at = s.unit + step * STEP, place = ring + (BYTES < RING_BYTES ? around(at) : at % RING_BYTES);
      constexpr int AT_ONCE = sizeof(storage) == 4 ? 1 : ROW;  // fp32 takes twice the registers
      UNROLL for (int first = 0; first < ROW; first += AT_ONCE) {
        Fragment weights[AT_ONCE][ARITY];
        UNROLL for (int i = 0; i < AT_ONCE; ++i)
          if (STEPS % ROW == 0 || step + first + i < STEPS)
            UNROLL for (int t = 0; t < ARITY; ++t) weights[i][t] = load_fragment(place + (first + i) * STEP + t * STEP_BYTES);
        UNROLL for (int i = 0; i < AT_ONCE; ++i)
          if (STEPS % ROW == 0 || step + first + i < STEPS) {
            const auto b = activation.at(step + first + i);
            UNROLL for (int t = 0; t < ARITY; ++t) tile[t][(first + i) % 2].add(weights[i][t], b);
          }
      }
      release(s, step + WARPS * ROW < STEPS ? (step + WARPS * ROW) * STEP : (step + ROW) * STEP);
    }
    next_unit(s, BYTES);
    UNROLL for (int t = 0; t < ARITY; ++t) {
      const float total = tile[t][0].sum() + tile[t][1].sum();
      if (lane % 4 == 0) dots[t * TILE_ROWS + lane / 4] = total;
    }
  }
  close_stream(s);
}

// The dots of units first … first + count, each row handed to ``finish(unit, dot)`` in a thread of its own.
template <int ARITY, int T, int K, class Finish>
DEVICE void for_units(Worker& w, Activation<K> a, int first, int count, Finish finish) {
  for (int batch = 0; batch < count; batch += BATCH_UNITS) {
    auto& dots = shared_state().dots[w.meetings++ & 1];
    const int units = count - batch < BATCH_UNITS ? count - batch : BATCH_UNITS;
    dot_units<ARITY, K>(a.x, units, dots[w.thread / 32]);
    worker_sync(w);
    const int unit = w.thread / TILE_ROWS;
    if (unit >= units) continue;
    vec dot[ARITY][T];
    UNROLL for (int t = 0; t < ARITY; ++t) {
      const int row = (unit * ARITY + t) * TILE_ROWS + w.thread % TILE_ROWS;
      const int team = unit % (CONSUMER_WARPS / SHARING<K>) * SHARING<K>;
      dot[t][0] = dots[team][row];
      UNROLL for (int warp = 1; warp < SHARING<K>; ++warp) dot[t][0] += dots[team + warp][row];
    }
    finish(first + batch + unit, dot);
  }
}

// Pass over units whose dots nobody needs.
template <int ARITY, int K>
DEVICE void skip_units(const Worker&, Activation<K>, int count) {
  Stream s = open_stream();
  ROLLED for (int i = 0; i < count; ++i) next_unit(s, UNIT_BYTES<ARITY, K>);
  close_stream(s);
}
