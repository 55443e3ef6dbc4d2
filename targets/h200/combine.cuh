// The splits of attention heads brought together: rows first · TILE_ROWS … of the combined vector [HEADS · HEAD_DIM], each
// handed to ``finish(unit, tiles)`` in its thread. ``records[0]``: accumulated values, the maximum and the sum of weights of
// every split of every head. An empty split (m = −∞) is left out.
template <int HEADS, int HEAD_DIM, int SPLITS, int T, class Finish>
DEVICE void combine_rows(const Worker& w, const float* const (&records)[T], int first, int count, Finish finish) {
  static_assert(T == 1, "this machine layer takes one token a step");
  constexpr int PART = HEAD_DIM + 2;
  for (int unit = first + w.thread / TILE_ROWS; unit < first + count; unit += CONSUMERS / TILE_ROWS) {
    const int row = unit * TILE_ROWS + row_in_tile();
    vec tiles[1][T] = {};
    if (row < HEADS * HEAD_DIM) {
      const float* parts = records[0] + row / HEAD_DIM * SPLITS * PART;
      float top = NOTHING, total = 0, value = 0;
      _Pragma("unroll 4") for (int s = 0; s < SPLITS; ++s) top = fmaxf(top, parts[s * PART + HEAD_DIM]);
      _Pragma("unroll 4") for (int s = 0; s < SPLITS; ++s) {
        const float most = parts[s * PART + HEAD_DIM], share = most == NOTHING ? 0.0f : __expf(most - top);
        total = fmaf(share, parts[s * PART + HEAD_DIM + 1], total);
        value = fmaf(share, parts[s * PART + row % HEAD_DIM], value);
      }
      tiles[0][0] = value / total;
    }
    finish(unit, tiles);
  }
}
