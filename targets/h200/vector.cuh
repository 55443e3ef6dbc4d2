// A vector made ready for dots: packed as the matrix instruction wants it, high parts and low parts. Each warp packs what its
// own dots will read, so that nobody waits.

// A vector of K values ready for this warp's dots, which are to be multiplied by ``rescale``. With NORMED also by the vector's
// 1 / rms: ``squares`` holds what each warp of the team has found of Σ x², once the warps have met.
template <int K, int WARPS, bool NORMED>
struct Activation {
  const float* x;  // the team's rows
  float rescale;
  const float* squares;
  float eps;
  bool known;
  float found;
  // After the first meeting; later the squares may be others' already.
  DEVICE_MEMBER float factor() {
    if constexpr (!NORMED) return 1.0f;
    if (!known) {
      float sum = squares[0];
      UNROLL for (int warp = 1; warp < WARPS; ++warp) sum += squares[warp];
      found = rsqrtf(sum / K + eps), known = true;
    }
    return found;
  }
};

// The values a lane has of its warp's rows, and where in the vector they are. Behind the vector's end they are 0.
template <int K, int WARPS>
struct Slice {
  static constexpr int MINE = (UNIT_ROWS<K> + WARPS - 1) / WARPS;
  static_assert(MINE <= 32, "a vector is too long for the registers of the warps that share it");
  float4 rows[MINE];
  DEVICE_MEMBER static int place(int i) { return ((threadIdx.x / 32 % WARPS + i * WARPS) * 32 + threadIdx.x % 32) * 4; }
  DEVICE_MEMBER static bool has(int i) { return K % (ROW_K * WARPS) == 0 || place(i) < K; }
};

template <int K>
DEVICE float4 load_quad(const float* x, int place) {
  if (K % 4 == 0) return *(const float4*)(x + place);
  return {x[place], place + 1 < K ? x[place + 1] : 0.0f, place + 2 < K ? x[place + 2] : 0.0f, place + 3 < K ? x[place + 3] : 0.0f};
}

// This lane's part of a vector in memory.
template <int K, int WARPS>
DEVICE void fetch(Slice<K, WARPS>& own, const float* x) {
  UNROLL for (int i = 0; i < own.MINE; ++i) own.rows[i] = own.has(i) ? load_quad<K>(x, own.place(i)) : float4{};
}

// Four values in two parts: ``high`` as stored, ``low`` what that leaves of them.
struct Halves { uint2 high, low; };
template <class Stored>
DEVICE Halves halves(float4 x, float scale) {
  const float4 v = {x.x * scale, x.y * scale, x.z * scale, x.w * scale};
  const uint2 high = {Pair<Stored>::pack({v.x, v.y}), Pair<Stored>::pack({v.z, v.w})};
  const float2 a = Pair<Stored>::unpack(high.x), b = Pair<Stored>::unpack(high.y);
  return {high, {Pair<Stored>::pack({v.x - a.x, v.y - a.y}), Pair<Stored>::pack({v.z - b.x, v.w - b.y})}};
}

DEVICE float largest(float4 v) { return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))); }

// The power of two by which the warp's values are divided, that of the largest: high parts must be within fp16's range, and low parts
// not below it. An infinity, like a NaN, makes everything a NaN. ``inverse`` is its inverse.
template <int K, int WARPS>
DEVICE float common_power(const Slice<K, WARPS>& own, float& inverse) {
  float most = 0;
  UNROLL for (int i = 0; i < own.MINE; ++i) most = fmaxf(most, largest(own.rows[i]));
  const uint32_t largest = __reduce_max_sync(~0u, __float_as_uint(most)) & 0x7f800000, power = largest ? largest : 127u << 23;
  inverse = __uint_as_float((254u << 23) - power);
  return __uint_as_float(power);
}

// Pack the warp's rows for its dots: of every 64 values the high parts, two in a word, and then the low parts. Returns the power they
// are divided by.
template <class Stored, int K, int WARPS>
DEVICE float pack_rows(const Slice<K, WARPS>& own, float* to) {
  if constexpr (sizeof(Stored) == 4) {
    UNROLL for (int i = 0; i < own.MINE; ++i)
      if (own.place(i) < UNIT_ROWS<K> * ROW_K) *(float4*)(to + own.place(i)) = own.rows[i];
    __syncwarp();
    return 1.0f;
  } else {
    float scale;
    const float power = common_power(own, scale);
    const int lane = threadIdx.x % 32;
    float* place = to + (threadIdx.x / 32 % WARPS) * ROW_K + lane / 16 * 64 + lane % 16 * 2;
    UNROLL for (int i = 0; i < own.MINE; ++i, place += WARPS * ROW_K) {
      if (own.place(i) >= UNIT_ROWS<K> * ROW_K) continue;
      const Halves h = halves<Stored>(own.rows[i], scale);
      *(uint2*)place = h.high;
      *(uint2*)(place + 32) = h.low;
    }
    __syncwarp();
    return power;
  }
}

// Where this warp's team keeps a packed vector.
template <int K, int WARPS>
DEVICE float* of_team(float* packed) { return packed + threadIdx.x / 32 / WARPS * UNIT_ROWS<K> * ROW_K; }

template <int K, int WARPS>
DEVICE_ONCE float pack_own(const float* x, float* to) {
  Slice<K, WARPS> own;
  fetch(own, x);
  __syncwarp();  // ``to`` may be ``x``: everything is read before anything is written
  return pack_rows<storage>(own, to);
}

// A vector in the worker's own memory, complete since its threads last met, made ready.
template <int T, int K, int WARPS>
DEVICE Activation<K, WARPS, false> prepare(const Worker&, const float* x, int, float* packed) {
  static_assert(T == 1, "this machine layer takes one token a step");
  float* to = of_team<K, WARPS>(packed);
  return {to, pack_own<K, WARPS>(x, to)};
}

// ── a vector on its way ──

// Poll this lane's part of a vector that others write.
template <int K, int WARPS>
DEVICE void poll_slice(Slice<K, WARPS>& own, const uint32_t* words, uint32_t tag) {
  uint4 found[Slice<K, WARPS>::MINE];
  uint32_t open = 0;
  UNROLL for (int i = 0; i < own.MINE; ++i) found[i] = {}, open |= own.has(i) ? 1u << i : 0;
  ROLLED while (__any_sync(~0u, open) && !leave_now()) {  // lanes that left one by one would stay apart in all that follows
    UNROLL for (int i = 0; i < own.MINE; ++i)
      if (open >> i & 1) found[i] = load_words(words + own.place(i));
    UNROLL for (int i = 0; i < own.MINE; ++i)
      if ((open >> i & 1) && !incomplete(found[i], tag, own.place(i), 0, K)) open &= ~(1u << i);
  }
  UNROLL for (int i = 0; i < own.MINE; ++i) {
    own.rows[i] = without_tags(found[i]);
    if (K % 4 == 0) continue;
    if (own.place(i) + 1 >= K) own.rows[i].y = 0;
    if (own.place(i) + 2 >= K) own.rows[i].z = 0;
    if (own.place(i) + 3 >= K) own.rows[i].w = 0;
  }
}

template <int K, int WARPS>
DEVICE_ONCE float take_own(const uint32_t* words, uint32_t tag, float* to) {
  Slice<K, WARPS> own;
  poll_slice(own, words, tag);
  return pack_rows<storage>(own, to);
}

// Scaled by ``scale`` + ``offset``; the warp's Σ x² goes to ``squares``.
template <int K, int WARPS>
DEVICE float take_normed(const uint32_t* words, uint32_t tag, const float* scale, float offset, float* to, float* squares) {
  Slice<K, WARPS> own, scales;
  UNROLL for (int i = 0; i < own.MINE; ++i) scales.rows[i] = {1, 1, 1, 1};
  if (scale) fetch(scales, scale);
  poll_slice(own, words, tag);
  stamp(1);
  float sum = 0;
  UNROLL for (int i = 0; i < own.MINE; ++i) {
    float4& v = own.rows[i];
    const float4 by = scales.rows[i];
    sum = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, sum))));
    v = {v.x * (by.x + offset), v.y * (by.y + offset), v.z * (by.z + offset), v.w * (by.w + offset)};
  }
  const float rescale = pack_rows<storage>(own, to);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) *squares = sum;
  return rescale;
}
template <int K, int WARPS>
DEVICE_ONCE float take_own_normed(const uint32_t* words, uint32_t tag, const float* scale, float offset, float* to, float* squares) {
  return take_normed<K, WARPS>(words, tag, scale, offset, to, squares);
}

// A vector that others write, taken in by every warp for itself: the worker's threads meet only after their dots.
template <int K, int WARPS>
DEVICE Activation<K, WARPS, false> take_in(Worker& w, Row source, float* packed) {
  float* to = of_team<K, WARPS>(packed);
  const float rescale = take_own<K, WARPS>(source.words, source.tag, to);
  stamp(1);
  return {to, rescale};
}

// The same of a vector that is to be normed: x / sqrt(mean(x²) + eps) · (scale + offset), of which the root comes after the dots.
template <int K, int WARPS>
DEVICE Activation<K, WARPS, true> take_in_normed(Worker& w, Row source, const float* scale, float offset, float eps, float* packed) {
  float *to = of_team<K, WARPS>(packed), *squares = shared_state().squares[w.meetings & 1];
  const int warp = w.thread / 32;
  const float rescale = take_own_normed<K, WARPS>(source.words, source.tag, scale, offset, to, squares + warp);
  return {to, rescale, squares + warp / WARPS * WARPS, eps};
}
