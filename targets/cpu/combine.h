// The splits of attention brought together row by row.

// What each split of a head counts, Σ l · exp(m − max m) divided out. An empty split (m = −∞) is left out.
template <int HEAD_DIM, int SPLITS>
DEVICE NOINLINE void split_shares(float (&share)[SPLITS], const float* records) {
  constexpr int RECORD = HEAD_DIM + 2;  // accumulated values, m, l
  float top = NOTHING, total = 0;
  for (int s = 0; s < SPLITS; ++s) top = records[s * RECORD + HEAD_DIM] > top ? records[s * RECORD + HEAD_DIM] : top;
  for (int s = 0; s < SPLITS; ++s) {
    const float m = records[s * RECORD + HEAD_DIM];
    share[s] = m == NOTHING ? 0 : exp(m - top);
    total += share[s] * records[s * RECORD + HEAD_DIM + 1];
  }
  for (int s = 0; s < SPLITS; ++s) share[s] = share[s] / total;
}

// Σ share · acc of the n values from i of a head.
template <int HEAD_DIM, int SPLITS>
DEVICE inline vec combine_values(const float (&share)[SPLITS], const float* records, int i, int n) {
  vec value = {};
  for (int s = 0; s < SPLITS; ++s, records += HEAD_DIM + 2)
    value = fma(n == TILE_ROWS ? load(records + i) : load_first(records + i, n), broadcast(share[s]), value);
  return value;
}

// The tiles of units first … first + count of the combined vectors [HEADS · HEAD_DIM] of T columns, each handed to
// ``finish(unit, tiles)``. records[t]: the column's partial results, [HEADS][SPLITS][HEAD_DIM + 2]. A tile may lie across heads.
template <int HEADS, int HEAD_DIM, int SPLITS, int T, class Finish>
DEVICE inline void combine_rows(const Worker&, const float* const (&records)[T], int first, int count, Finish finish) {
  float share[T][SPLITS];
  int known = -1;  // the head whose shares these are
  for (int unit = first; unit < first + count; ++unit) {
    const int begin = unit * TILE_ROWS, end = begin + TILE_ROWS < HEADS * HEAD_DIM ? begin + TILE_ROWS : HEADS * HEAD_DIM;
    float rows[T][TILE_ROWS] = {};
    for (int row = begin, next; row < end; row = next) {
      const int head = row / HEAD_DIM, n = ((head + 1) * HEAD_DIM < end ? (head + 1) * HEAD_DIM : end) - row;
      next = row + n;
      for (int t = 0; t < T; ++t) {
        const float* own = records[t] + head * SPLITS * (HEAD_DIM + 2);
        if (head != known) split_shares<HEAD_DIM>(share[t], own);
        const vec value = combine_values<HEAD_DIM>(share[t], own, row % HEAD_DIM, n);
        n == TILE_ROWS ? store(rows[t], value) : store_first(rows[t] + row - begin, value, n);
      }
      known = head;
    }
    vec tiles[1][T];
    for (int t = 0; t < T; ++t) tiles[0][t] = load(rows[t]);
    finish(unit, tiles);
  }
}

// The splits of every head brought together: Σ acc · exp(m − max m) / Σ l · exp(m − max m). An empty split (m = −∞) is left out.
template <int HEADS, int HEAD_DIM, int SPLITS>
DEVICE inline void attention_combine(const Worker& w, float* y, const float* partials) {
  constexpr int PART = HEAD_DIM + 2;  // accumulated values, m, l
  for (int head = 0; head < HEADS; ++head, partials += SPLITS * PART, y += HEAD_DIM) {
    float top = NOTHING, total = 0, share[SPLITS];
    UNROLL for (int s = 0; s < SPLITS; ++s) top = partials[s * PART + HEAD_DIM] > top ? partials[s * PART + HEAD_DIM] : top;
    UNROLL for (int s = 0; s < SPLITS; ++s) {
      const float m = partials[s * PART + HEAD_DIM];
      share[s] = m == NOTHING ? 0 : exp(m - top);
      total += share[s] * partials[s * PART + HEAD_DIM + 1];
    }
    for (int i = walk_begin(w); i < HEAD_DIM; i += walk_step(w)) {
      vec value = {};
      UNROLL for (int s = 0; s < SPLITS; ++s) value = fma(load_at<HEAD_DIM>(partials + s * PART, i), broadcast(share[s] / total), value);
      store_at<HEAD_DIM>(y, i, value);
    }
  }
}
