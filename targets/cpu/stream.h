// The weight stream: units of [k][ARITY][TILE_ROWS] values, read once, in order. Prefetching runs PREFETCH_BYTES ahead of
// the dots, across units and stages, and further while the worker waits: the stream itself never waits for activations.

DEVICE inline const storage* take(Worker& w, int64_t values) {
  const storage* unit = (const storage*)w.stream.next;
  w.stream.next += values * sizeof(storage);
  return unit;
}

// Fetch one more page of the stream into the cache, at most WAIT_PREFETCH_BYTES ahead; behind the last byte comes the first.
DEVICE inline void prefetch_while_waiting(Worker& w) {
  Stream& s = w.stream;
  if (s.ahead < s.next) s.ahead = s.next;
  if (s.ahead - s.next >= WAIT_PREFETCH_BYTES) return;
  const int64_t length = s.last - s.first;
  for (int i = 0; i < 16; ++i, s.ahead += 64) __builtin_prefetch(s.ahead < s.last ? s.ahead : s.ahead - length);
}

// dot[a][t][r] = Σ weights[i][a][r] · x[t·pitch + i] over i < k, summed in CHAINS interleaved parts that are added in
// order: long enough a row of independent sums to hide the latency of fma, and the same order every time.
template <int ARITY, int T>
DEVICE NOINLINE void dot_unit(const storage* weights, const float* x, int pitch, int k, vec (&dot)[ARITY][T]) {
  constexpr int CHAINS = ARITY * T >= 8 ? 1 : 8 / (ARITY * T);
  constexpr int STEP = 8, ROW = ARITY * TILE_ROWS;
  vec sum[CHAINS][ARITY][T] = {};
  int i = 0;
  for (; i + STEP <= k; i += STEP, weights += STEP * ROW) {
    UNROLL for (int line = 0; line < STEP * ROW * (int)sizeof(storage); line += 64)
      __builtin_prefetch((const char*)weights + PREFETCH_BYTES + line);
    UNROLL for (int s = 0; s < STEP; ++s)
      UNROLL for (int a = 0; a < ARITY; ++a) {
        const vec row = load(weights + s * ROW + a * TILE_ROWS);
        UNROLL for (int t = 0; t < T; ++t)
          sum[s % CHAINS][a][t] = fma(row, broadcast(x[t * pitch + i + s]), sum[s % CHAINS][a][t]);
      }
  }
  for (; i < k; ++i, weights += ROW)
    UNROLL for (int a = 0; a < ARITY; ++a)
      UNROLL for (int t = 0; t < T; ++t)
        sum[0][a][t] = fma(load(weights + a * TILE_ROWS), broadcast(x[t * pitch + i]), sum[0][a][t]);
  UNROLL for (int a = 0; a < ARITY; ++a)
    UNROLL for (int t = 0; t < T; ++t) {
      UNROLL for (int half = CHAINS / 2; half; half /= 2)
        UNROLL for (int c = 0; c < half; ++c) sum[c][a][t] += sum[c + half][a][t];
      dot[a][t] = sum[0][a][t];
    }
}

// The vectors that dots are taken with, [T][pitch] of which k values count: as they are.
struct Activation { const float* x; int pitch, k; };
template <int T, int K>
DEVICE inline Activation prepare(const Worker&, const float* x, int pitch) { return {x, pitch, K}; }

// The dots of units first … first + count with T columns, each handed to ``finish(unit, dot)``.
template <int ARITY, int T, class Finish>
DEVICE inline bool for_units(Worker& w, Activation a, int first, int count, Finish finish) {
  for (int unit = first; unit < first + count; ++unit) {
    vec dot[ARITY][T];
    dot_unit<ARITY, T>(take(w, (int64_t)a.k * ARITY * TILE_ROWS), a.x, a.pitch, a.k, dot);
    finish(unit, dot);
  }
  return true;
}

// Pass over units whose dots nobody needs.
template <int ARITY>
DEVICE inline void skip_units(Worker& w, Activation a, int count) { take(w, (int64_t)a.k * ARITY * TILE_ROWS * count); }

DEVICE inline void rewind_stream(Worker& w) {
  if (w.stream.ahead > w.stream.last) w.stream.ahead -= w.stream.last - w.stream.first;
  else w.stream.ahead = w.stream.first;
  w.stream.next = w.stream.first;
}
