// Moving the rows of a unit's tiles to and from vectors and caches. Rows past the end are padding: they read as 0 and are
// never stored.

template <class Rows>
DEVICE inline vec load_rows(const float* vector, int unit, int tile) {
  const int n = Rows::count(unit);
  if (Rows::WHOLE) {
    const float* first = vector + Rows::row(unit, tile, 0);
    return n == TILE_ROWS ? load(first) : load_first(first, n);
  }
  float rows[TILE_ROWS] = {};
  for (int i = 0; i < n; ++i) rows[i] = vector[Rows::row(unit, tile, i)];
  return load(rows);
}

template <class Rows>
DEVICE inline void store_rows(float* vector, int unit, int tile, vec v) {
  const int n = Rows::count(unit);
  if (Rows::WHOLE) {
    float* first = vector + Rows::row(unit, tile, 0);
    return n == TILE_ROWS ? store(first, v) : store_first(first, v, n);
  }
  for (int i = 0; i < n; ++i) vector[Rows::row(unit, tile, i)] = v[i];
}

// Append rows to one position of a cache [kv heads][CAPACITY][PITCH]; ``cache`` is that position of the lane's first head.
// Readers find them there, so nothing else goes to the exchange than that they are there.
template <class Rows, int HEAD_DIM, int PITCH>
DEVICE NOINLINE void append_rows(const Worker&, storage* cache, Row, int unit, int tile, vec v) {
  const int n = Rows::count(unit);
  auto place = [&](int i) {
    const int row = Rows::row(unit, tile, i);
    return cache + (int64_t)(row / HEAD_DIM) * CAPACITY * PITCH + row % HEAD_DIM;
  };
  if (Rows::WHOLE && HEAD_DIM % TILE_ROWS == 0 && n == TILE_ROWS) return store(place(0), v);
  for (int i = 0; i < n; ++i) from_float(place(i), v[i]);
}

// What the position's rope table holds for a unit's pairs; ``still`` for pairs that do not turn.
template <class Rows>
DEVICE NOINLINE vec rope_angles(const float* table, int unit, float still) {
  if (Rows::WHOLE && Rows::count(unit) == TILE_ROWS) return load(table + Rows::pair(unit, 0));
  float angles[TILE_ROWS];
  for (int i = 0; i < TILE_ROWS; ++i) angles[i] = Rows::pair(unit, i) < Rows::ROTARY / 2 ? table[Rows::pair(unit, i)] : still;
  return load(angles);
}

// The tiles of units first … first + count of T rows of a table, each handed to ``finish(unit, tiles)``.
template <int WIDTH, int T, class Finish>
DEVICE inline void for_rows(const Worker&, const storage* const (&rows)[T], int first, int count, Finish finish) {
  for (int unit = first; unit < first + count; ++unit) {
    vec tiles[1][T];
    for (int t = 0; t < T; ++t) tiles[0][t] = load_at<WIDTH>(rows[t], unit * TILE_ROWS);
    finish(unit, tiles);
  }
}

// The tiles of units first … first + count, of which ``finish(unit, nothing)`` finds the rows by itself.
template <int T, class Finish>
DEVICE inline void each_row(const Worker&, int first, int count, Finish finish) {
  const vec nothing[1][T] = {};
  for (int unit = first; unit < first + count; ++unit) finish(unit, nothing);
}

// Rows first … last of a vector, by the worker alone.
DEVICE inline void copy_rows(const Worker&, float* to, const float* from, int first, int last) {
  int i = first;
  for (; i + TILE_ROWS <= last; i += TILE_ROWS) store(to + i, load(from + i));
  for (; i < last; ++i) to[i] = from[i];
}

// Logits of column t, rows of the vocabulary from ``base``: kept where somebody asked for them, and into the running best, where the
// first of equal logits wins and a NaN sticks.
template <class Rows>
DEVICE NOINLINE void take_logits(Worker& w, int t, int base, int unit, vec v) {
  const int n = Rows::count(unit), row = base + Rows::row(unit, 0, 0);
  if (w.launch->mode != MODE_GENERATE && t < w.columns) keep_logits(w, t, row, n, v);
  Best& best = w.best[t];
  if (best.index < 0 || !any_not_below(v, broadcast(best.logit))) return;
  for (int i = 0; i < n; ++i) {
    if (v[i] != v[i]) return void(best.index = -1);
    if (v[i] > best.logit || (v[i] == best.logit && row + i < best.index)) best = {v[i], row + i};
  }
}
