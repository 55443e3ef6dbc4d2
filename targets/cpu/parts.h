// Loads and stores of whole and part vecs, and the horizontal operations.

// The first n values of a vec; the others read as 0 and are not written.
template <class Stored>
DEVICE inline vec load_first(const Stored* p, int n) {
  Stored whole[TILE_ROWS] = {};
  for (int i = 0; i < n; ++i) whole[i] = p[i];
  return load(whole);
}
template <class Stored>
DEVICE inline void store_first(Stored* p, vec v, int n) {
  Stored whole[TILE_ROWS];
  store(whole, v);
  for (int i = 0; i < n; ++i) p[i] = whole[i];
}

// Values i … i + TILE_ROWS of a vector of WIDTH; the test for its end is compiled away where tiles fit exactly.
template <int WIDTH, class Stored>
DEVICE inline vec load_at(const Stored* p, int i) {
  if (WIDTH % TILE_ROWS == 0 || i + TILE_ROWS <= WIDTH) return load(p + i);
  return load_first(p + i, WIDTH - i);
}
template <int WIDTH, class Stored>
DEVICE inline void store_at(Stored* p, int i, vec v) {
  if (WIDTH % TILE_ROWS == 0 || i + TILE_ROWS <= WIDTH) return store(p + i, v);
  store_first(p + i, v, WIDTH - i);
}

// Sum and maximum of all values of a vec, in a fixed order.
DEVICE inline float sum(vec v) {
  UNROLL for (int half = TILE_ROWS / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) v[i] += v[i + half];
  return v[0];
}
DEVICE inline float maximum(vec v) {
  UNROLL for (int half = TILE_ROWS / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) v[i] = v[i] < v[i + half] ? v[i + half] : v[i];
  return v[0];
}

// A worker is one thread: it holds whole vectors, walks them from 0 in steps of a vec, and is in step with itself.
DEVICE inline int walk_begin(const Worker&) { return 0; }
DEVICE inline int walk_step(const Worker&) { return TILE_ROWS; }
DEVICE inline float worker_sum(const Worker&, vec v) { return sum(v); }
DEVICE inline void worker_sync(const Worker&) {}
