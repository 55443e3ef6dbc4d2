// Moving the rows of a unit's tiles to and from vectors and caches: a thread has row threadIdx mod TILE_ROWS of its unit's tiles. Rows
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

// Rows of a cache are cut into granules of 16 bytes, and granule g of position p stands in place g ^ (p mod SHIFTS), so that
// eight neighbouring rows' granules lie in different banks of shared memory.
template <int HEAD_DIM>
struct CacheRow {
  static constexpr int GRANULE = 16 / sizeof(storage), BYTES = (HEAD_DIM * sizeof(storage) + 15) / 16 * 16, GRANULES = BYTES / 16;
  static constexpr int SHIFTS = GRANULES % 8 == 0 ? 8 : GRANULES % 4 == 0 ? 4 : GRANULES % 2 == 0 ? 2 : 1;
  DEVICE_MEMBER static int granule(int g, int position) { return g ^ position % SHIFTS; }
  DEVICE_MEMBER static int value(int i, int position) { return granule(i / GRANULE, position) * GRANULE + i % GRANULE; }
};

// Append rows to one position of a cache [kv heads][CAPACITY][PITCH], where ``cache`` is that position of the lane's first
// head: for later steps. This step's readers take them, as the cache rounds them, from the exchange: ``fresh``.
template <class Rows, int HEAD_DIM, int PITCH>
DEVICE void append_rows(const Worker& w, storage* cache, Row fresh, int unit, int tile, vec v) {
  if (row_in_tile() >= Rows::count(unit)) return;
  const int row = Rows::row(unit, tile, row_in_tile());
  storage* at = cache + (int64_t)(row / HEAD_DIM) * CAPACITY * PITCH + CacheRow<HEAD_DIM>::value(row % HEAD_DIM, w.position[0]);
  narrow(at, v);
  fresh.put(row, widen(*at));
}

// What the position's rope table holds for a unit's pairs; ``still`` for pairs that do not turn.
template <class Rows>
DEVICE vec rope_angles(const float* table, int unit, float still) {
  const int pair = Rows::pair(unit, row_in_tile());
  return pair < Rows::ROTARY / 2 ? table[pair] : still;
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

// The tiles of units first … first + count, of which ``finish(unit, nothing)`` finds each row by itself, in its thread.
template <int T, class Finish>
DEVICE void each_row(const Worker& w, int first, int count, Finish finish) {
  const vec nothing[1][T] = {};
  ROLLED for (int unit = first + w.thread / TILE_ROWS; unit < first + count; unit += CONSUMERS / TILE_ROWS) finish(unit, nothing);
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
