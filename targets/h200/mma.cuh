// Dots of weights with a vector, by matrix instructions (mma.m16n8k16). A fragment is what one of them takes as its A, a lane's
// part of it eight weights. Of a unit with two tiles, the sixteen rows of A are four rows of each tile, and once more with the
// next sixteen weights: STEP_K<2> = 32. Of a unit with one tile, they are its four rows with four times sixteen weights:
// STEP_K<1> = 64. B has a column for each sixteen values of the vector, high parts, and one for their low parts. High and low
// part together are the fp32 value to 16 bits (bf16) or 22 bits (fp16), and weights are never rounded again.

template <int ARITY>
constexpr int STEP_K = 64 / ARITY;
constexpr int FRAGMENT_BYTES = 256 * sizeof(storage);
static_assert(TILE_ROWS == 4, "a matrix instruction takes two tiles of four rows");

static_assert(ROW_K == 128, "four values of the vector for each lane of a warp");

// A row of a unit takes ROW_K values of the vector. It stands in the stream in pieces of two
// fragments: one for each of its tiles. WARPS warps, a team, share a unit's rows, and several teams take turns with units.
constexpr int PIECE_FRAGMENTS = 2, PIECE_BYTES = PIECE_FRAGMENTS * FRAGMENT_BYTES;
template <int K>
constexpr int UNIT_ROWS = (K + ROW_K - 1) / ROW_K;

// One lane's part of a fragment; twice as many words for fp32 weights, which are multiplied one by one.
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
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
  }
};
template <>
struct Pair<bf16> {
  DEVICE_MEMBER static uint32_t pack(float2 x) { const __nv_bfloat162 h = __floats2bfloat162_rn(x.x, x.y); return *(const uint32_t*)&h; }
  DEVICE_MEMBER static float2 unpack(uint32_t word) { return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000)}; }
  DEVICE_MEMBER static void multiply(float (&c)[4], uint4 a, uint2 b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
  }
};

// What a warp gathers of a unit: C of the matrix instruction, in two chains, so that none need wait for the one before.
template <class Stored, int ARITY>
struct Dot {
  float c[2][4] = {};
  DEVICE_MEMBER void add(int chain, const Fragment& f, uint2 b) { Pair<Stored>::multiply(c[chain], f.words[0], b); }
  // The row lane / 4 of the unit's tiles, in lanes 4 · row: over the columns that its weights belong to.
  DEVICE_MEMBER float sum() const {
    const int lane = threadIdx.x % 32;
    float own[4];
    UNROLL for (int i = 0; i < 4; ++i) own[i] = c[0][i] + c[1][i];
    if constexpr (ARITY == 2) {
      const float mine = own[0] + own[3];
      return mine + __shfl_xor_sync(~0u, mine, 1);
    } else {
      const float low = lane & 1 ? own[2] : own[0], high = lane & 1 ? own[3] : own[1];
      float mine = lane < 16 ? low : high;
      UNROLL for (int lanes : {1, 2, 16}) mine += __shfl_xor_sync(~0u, mine, lanes);
      return mine;
    }
  }
};

// A step's B as one lane reads it in a packed vector (vector.cuh). Of two tiles, the upper lanes' columns are zero: they always
// read the same zeros.
template <class Stored, int ARITY>
struct Reader {
  uint32_t place;
  DEVICE_MEMBER Reader(const float* x) {
    const int lane = threadIdx.x % 32;
    place = ARITY == 1 || lane < 8 ? shared_address(x) + lane * 8 : lane < 16 ? shared_address(x) + 128 + (lane - 8) * 8 : shared_address(&shared_state().nothing);
  }
  DEVICE_MEMBER uint2 at(int row, int step) const {
    const uint32_t at = row * ROW_K * 4 + (ARITY == 1 ? step * 256 : step / 2 * 256 + step % 2 * 64);
    return load_two_words(ARITY == 1 || threadIdx.x % 32 < 16 ? place + at : place);
  }
};

template <int ARITY>
struct Dot<fp32, ARITY> {
  float c[2] = {};
  struct B { float4 halves[2]; };
  DEVICE_MEMBER void add(int chain, const Fragment& f, const B& b) {
    UNROLL for (int i = 0; i < 2; ++i) {  // both halves' i-th pairs
      const uint4 v = f.words[i % (int)(sizeof(storage) / 2)];
      c[chain] = fmaf(__uint_as_float(v.x), i ? b.halves[0].z : b.halves[0].x, c[chain]);
      c[chain] = fmaf(__uint_as_float(v.y), i ? b.halves[0].w : b.halves[0].y, c[chain]);
      c[chain] = fmaf(__uint_as_float(v.z), i ? b.halves[1].z : b.halves[1].x, c[chain]);
      c[chain] = fmaf(__uint_as_float(v.w), i ? b.halves[1].w : b.halves[1].y, c[chain]);
    }
  }
  DEVICE_MEMBER float sum() const {
    float mine = c[0] + c[1];
    UNROLL for (int lanes : {1, 2}) mine += __shfl_xor_sync(~0u, mine, lanes);
    return ARITY == 1 ? mine + __shfl_xor_sync(~0u, mine, 16) : mine;
  }
};
template <int ARITY>
struct Reader<fp32, ARITY> {
  const float* x;
  DEVICE_MEMBER Reader(const float* x) : x(x + threadIdx.x % 4 * 4 + (ARITY == 1 ? threadIdx.x % 32 / 16 * 16 : 0)) {}
  DEVICE_MEMBER auto at(int row, int step) const {
    const float* first = x + row * ROW_K + step * STEP_K<ARITY>;
    return typename Dot<fp32, ARITY>::B{*(const float4*)first, *(const float4*)(first + STEP_K<ARITY> / 2)};
  }
};
