// Moving the rows of a unit's tiles to and from vectors and caches: a thread has row threadIdx mod 8 of its unit's tiles. Rows
// past the end are padding: they read as 0 and are never stored.

DEVICE int row_in_tile() { return threadIdx.x % TILE_ROWS; }

template <class Rows>
DEVICE vec load_rows(const float* vector, int unit, int tile) {
  return row_in_tile() < Rows::count(unit) ? vector[Rows::row(unit, tile, row_in_tile())] : 0.0f;
}

template <class Rows>
DEVICE void store_rows(float* vector, int unit, int tile, vec v) {
  if (row_in_tile() < Rows::count(unit)) vector[Rows::row(unit, tile, row_in_tile())] = v;
}
template <class Rows>
DEVICE void store_rows(Row to, int unit, int tile, vec v) {
  if (row_in_tile() < Rows::count(unit)) to.put(Rows::row(unit, tile, row_in_tile()), v);
}

// Append rows to one position of a cache [kv heads][CAPACITY][PITCH], where ``cache`` is that position of the lane's first
// head: for later steps. This step's readers take them, as the cache rounds them, from the exchange: ``fresh``.
template <class Rows, int HEAD_DIM, int PITCH>
DEVICE void append_rows(storage* cache, Row fresh, int unit, int tile, vec v) {
  if (row_in_tile() >= Rows::count(unit)) return;
  const int row = Rows::row(unit, tile, row_in_tile());
  storage* at = cache + (int64_t)(row / HEAD_DIM) * CAPACITY * PITCH + row % HEAD_DIM;
  narrow(at, v);
  fresh.put(row, widen(*at));
}

// What the position's rope table holds for a unit's pairs; ``still`` for pairs that do not turn.
template <class Rows>
DEVICE vec rope_angles(const float* table, int unit, float still) {
  const int pair = Rows::pair(unit, row_in_tile());
  return pair < Rows::ROTARY / 2 ? __ldg(table + pair) : still;
}

// The tiles of units first … first + count of T rows of a table, each row handed to ``finish(unit, tiles)`` in its thread.
template <int WIDTH, int T, class Finish>
DEVICE void for_rows(const Worker& w, const storage* const (&rows)[T], int first, int count, Finish finish) {
  for (int unit = first + w.thread / TILE_ROWS; unit < first + count; unit += CONSUMERS / TILE_ROWS) {
    vec tiles[1][T];
    const int row = unit * TILE_ROWS + row_in_tile();
    for (int t = 0; t < T; ++t) tiles[0][t] = row < WIDTH ? widen(rows[t][row]) : 0.0f;
    finish(unit, tiles);
  }
}

// Rows first … last of a vector, by the whole worker.
DEVICE void copy_rows(const Worker& w, float* to, const float* from, int first, int last) {
  for (int i = first + w.thread; i < last; i += CONSUMERS) to[i] = from[i];
}
DEVICE void copy_rows(const Worker& w, Row to, const float* from, int first, int last) {
  for (int i = first + w.thread; i < last; i += CONSUMERS) to.put(i, from[i]);
}
DEVICE void copy_rows(const Worker& w, float* to, Row from, int first, int last) {  // of what this worker has just put there
  worker_sync(w);
  for (int i = first + w.thread; i < last; i += CONSUMERS) to[i] = __uint_as_float(load_word(from.words + i) & ~3u);
}

// The row's logit: to the host when it asked, and into the thread's running best, where the first of equal logits wins and a
// NaN sticks.
template <class Rows>
DEVICE void take_logits(Worker& w, int t, int base, int unit, vec v) {
  if (row_in_tile() >= Rows::count(unit)) return;
  const int row = base + Rows::row(unit, 0, row_in_tile());
  if (w.launch->mode == MODE_TEACHER_FORCED)
    w.launch->logits[(int64_t)(w.position[t] - w.launch->start_position) * VOCAB + row] = v;
  w.best[t] = better(w.best[t], v == v ? Best{v, row} : Best{NOTHING, -1});
}
