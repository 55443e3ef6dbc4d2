// The splits of attention heads brought together. ``records``: accumulated values, the maximum and the sum of weights of every split of
// every head. An empty split (m = −∞) is left out.

// Row ``row`` of the combined heads, by the LANES neighbouring threads that call this with one ``lane`` each.
template <int HEAD_DIM, int SPLITS, int LANES>
DEVICE float combined_row(const float* records, int row, int lane) {
  constexpr int PART = HEAD_DIM + 2, EACH = (SPLITS + LANES - 1) / LANES;
  const float* parts = records + row / HEAD_DIM * SPLITS * PART;
  float tops[EACH], top = NOTHING, total = 0, value = 0;
  UNROLL for (int i = 0; i < EACH; ++i) {
    const int split = lane + i * LANES;
    tops[i] = SPLITS % LANES == 0 || split < SPLITS ? parts[split * PART + HEAD_DIM] : NOTHING;
    top = fmaxf(top, tops[i]);
  }
  UNROLL for (int lanes = LANES / 2; lanes; lanes /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
  UNROLL for (int i = 0; i < EACH; ++i) {
    if (tops[i] == NOTHING) continue;
    const float* part = parts + (lane + i * LANES) * PART;
    const float share = __expf(tops[i] - top);
    total = fmaf(share, part[HEAD_DIM + 1], total);
    value = fmaf(share, part[row % HEAD_DIM], value);
  }
  UNROLL for (int lanes = LANES / 2; lanes; lanes /= 2) {
    total += __shfl_xor_sync(~0u, total, lanes);
    value += __shfl_xor_sync(~0u, value, lanes);
  }
  return value / total;
}

DEVICE_MEMBER constexpr int combining_lanes(int splits, int lanes = TILE_ROWS) { return lanes < splits && lanes < 32 ? combining_lanes(splits, 2 * lanes) : lanes; }

// Rows first · TILE_ROWS … of the combined vector [HEADS · HEAD_DIM], each handed to ``finish(unit, tiles)`` in its thread.
template <int HEADS, int HEAD_DIM, int SPLITS, int T, class Finish>
DEVICE void combine_rows(const Worker& w, const float* const (&records)[T], int first, int count, Finish finish) {
  static_assert(T == 1, "this machine layer takes one token a step");
  constexpr int LANES = combining_lanes(SPLITS);
  const int end = (first + count) * TILE_ROWS < HEADS * HEAD_DIM ? (first + count) * TILE_ROWS : HEADS * HEAD_DIM, lane = w.thread % LANES;
  ROLLED for (int begin = first * TILE_ROWS; begin < end; begin += CONSUMERS / LANES) {
    const int row = begin + w.thread / LANES;
    const vec tiles[1][T] = {{combined_row<HEAD_DIM, SPLITS, LANES>(records[0], row < end ? row : end - 1, lane)}};
    if (row < end && lane == row % TILE_ROWS) finish(row / TILE_ROWS, tiles);
  }
}

// The whole combined vector, into ``y``.
template <int HEADS, int HEAD_DIM, int SPLITS>
DEVICE void attention_combine(const Worker& w, float* y, const float* records) {
  constexpr int LANES = SPLITS < 4 ? 1 : 4;
  ROLLED for (int begin = 0; begin < HEADS * HEAD_DIM; begin += CONSUMERS / LANES) {
    const int row = begin + w.thread / LANES, last = HEADS * HEAD_DIM - 1;
    const float value = combined_row<HEAD_DIM, SPLITS, LANES>(records, row < last ? row : last, w.thread % LANES);
    if (row <= last && w.thread % LANES == 0) y[row] = value;
  }
}
