// Attention of one key/value head over a span of cache positions for GROUP query heads and T columns, in blocks of keys with
// a running maximum. Queries go in batches of up to four, so that keys and values, once widened, serve several of them.

constexpr int BLOCK_KEYS = 64;

template <int HEAD_DIM>
constexpr int HEAD_PITCH = (HEAD_DIM + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;

// QUERIES queries in a row and what they have gathered so far: acc, the largest score, the sum of weights.
template <int HEAD_DIM, int QUERIES>
struct Batch {
  alignas(64) float query[QUERIES][HEAD_PITCH<HEAD_DIM>], acc[QUERIES][HEAD_PITCH<HEAD_DIM>];
  float top[QUERIES], total[QUERIES];
};

template <int BYTES>
DEVICE inline void prefetch_bytes(const storage* first) {
  UNROLL for (int line = 0; line < BYTES; line += 64) __builtin_prefetch((const char*)first + line);
}

// score[q][i] = query q · key i for QUERIES queries and n keys; keys behind the last repeat it. On the way the values
// of these keys are fetched into the cache.
template <int HEAD_DIM, int QUERIES>
DEVICE inline void score_keys(float (*score)[BLOCK_KEYS], const float (*query)[HEAD_PITCH<HEAD_DIM>], const storage* keys,
                              const storage* values, int n) {
  constexpr int KEYS = TILE_ROWS / (QUERIES == 3 ? 4 : QUERIES);  // sums() takes TILE_ROWS products at a time
  for (int first = 0; first < n; first += KEYS) {
    prefetch_bytes<KEYS * HEAD_DIM * (int)sizeof(storage)>(values + (int64_t)first * HEAD_DIM);
    const storage* key[KEYS];
    for (int i = 0; i < KEYS; ++i) key[i] = keys + (int64_t)(first + i < n ? first + i : n - 1) * HEAD_DIM;
    vec products[TILE_ROWS] = {};
    for (int d = 0; d < HEAD_DIM; d += TILE_ROWS) {
      UNROLL for (int i = 0; i < KEYS; ++i) {
        const vec part = load_at<HEAD_DIM>(key[i], d);
        UNROLL for (int q = 0; q < QUERIES; ++q) products[q * KEYS + i] = fma(part, load(query[q] + d), products[q * KEYS + i]);
      }
    }
    float found[TILE_ROWS];
    store(found, sums(products));
    UNROLL for (int q = 0; q < QUERIES; ++q) __builtin_memcpy(score[q] + first, found + q * KEYS, sizeof(float) * KEYS);
  }
}

// Scores to weights exp(score − top) with a new top; returns what everything gathered under the old top is worth now.
DEVICE inline float weigh(float* score, int n, int from, int to, float softcap, float& top, float& total) {
  vec most = broadcast(NOTHING);
  for (int i = 0; i < n; i += TILE_ROWS) {
    vec part = load(score + i);
    if (softcap > 0) part = broadcast(softcap) * tanh(part / broadcast(softcap));
    if (i < from || i + TILE_ROWS > to)
      for (int j = 0; j < TILE_ROWS; ++j) part[j] = i + j < from || i + j >= to ? NOTHING : part[j];
    store(score + i, part);
    most = most < part ? part : most;
  }
  const float block_top = maximum(most), new_top = block_top > top ? block_top : top;
  if (new_top == NOTHING) {  // no key to see so far; −∞ − −∞ would make a NaN
    for (int i = 0; i < n; ++i) score[i] = 0;
    return 1;
  }
  vec weights = {};
  for (int i = 0; i < n; i += TILE_ROWS) {
    const vec part = exp(load(score + i) - broadcast(new_top));
    store(score + i, part);
    weights += part;
  }
  const float keep = exp(top - new_top);
  total = total * keep + sum(weights);
  top = new_top;
  return keep;
}

// acc[q] = acc[q] · keep[q] + Σ weight[q][i] · value i, COUNT vecs of the head at a time; on the way the keys of
// the next block are fetched into the cache.
template <int HEAD_DIM, int QUERIES, int DONE = 0>
DEVICE inline void add_values(float (*acc)[HEAD_PITCH<HEAD_DIM>], const float* keep, const float (*weight)[BLOCK_KEYS],
                              const storage* values, const storage* next_keys, int n) {
  constexpr int LEFT = HEAD_PITCH<HEAD_DIM> / TILE_ROWS - DONE, MOST = 12 / QUERIES, COUNT = LEFT < MOST ? LEFT : MOST;
  vec sum[QUERIES][COUNT];
  UNROLL for (int q = 0; q < QUERIES; ++q)
    UNROLL for (int c = 0; c < COUNT; ++c) sum[q][c] = load(acc[q] + (DONE + c) * TILE_ROWS) * broadcast(keep[q]);
  for (int i = 0; i < n; ++i) {
    if (DONE == 0) prefetch_bytes<HEAD_DIM * (int)sizeof(storage)>(next_keys + (int64_t)i * HEAD_DIM);
    UNROLL for (int c = 0; c < COUNT; ++c) {
      const vec part = load_at<HEAD_DIM>(values + (int64_t)i * HEAD_DIM, (DONE + c) * TILE_ROWS);
      UNROLL for (int q = 0; q < QUERIES; ++q) sum[q][c] = fma(broadcast(weight[q][i]), part, sum[q][c]);
    }
  }
  UNROLL for (int q = 0; q < QUERIES; ++q)
    UNROLL for (int c = 0; c < COUNT; ++c) store(acc[q] + (DONE + c) * TILE_ROWS, sum[q][c]);
  if constexpr (LEFT > COUNT) add_values<HEAD_DIM, QUERIES, DONE + COUNT>(acc, keep, weight, values, next_keys, n);
}

// Queries ``first`` … of the GROUP · T (column by column) over the span.
template <int GROUP, int HEAD_DIM, int T, int QUERIES>
DEVICE NOINLINE void attend_batch(const Worker& w, int first, const float* const (&q)[T], const storage* keys, const storage* values,
                                  AttentionSpan span, float scale, float softcap, float* const (&out)[T], int out_stride) {
  Batch<HEAD_DIM, QUERIES> batch = {};
  for (int c = 0; c < QUERIES; ++c) {
    const float* from = q[(first + c) / GROUP] + (first + c) % GROUP * HEAD_DIM;
    for (int d = 0; d < HEAD_DIM; ++d) batch.query[c][d] = from[d] * scale;
    batch.top[c] = NOTHING;
  }
  for (int block = span.first; block < span.last; block += BLOCK_KEYS) {
    const int n = span.last - block < BLOCK_KEYS ? span.last - block : BLOCK_KEYS;
    alignas(64) float score[QUERIES][BLOCK_KEYS];
    score_keys<HEAD_DIM, QUERIES>(score, batch.query, keys + (int64_t)block * HEAD_DIM, values + (int64_t)block * HEAD_DIM, n);
    float keep[QUERIES];
    int end[QUERIES], common = n;  // keys of the block that a query sees; that all of them see
    for (int c = 0; c < QUERIES; ++c) {
      const int position = w.position[(first + c) / GROUP];
      const int oldest = span.window && position >= span.window ? position - span.window + 1 : 0;
      const int from = oldest > block ? oldest - block : 0;
      end[c] = position + 1 - block < n ? position + 1 - block : n;
      common = end[c] < common ? end[c] : common;
      keep[c] = weigh(score[c], n, from, end[c], softcap, batch.top[c], batch.total[c]);
    }
    const storage *value = values + (int64_t)block * HEAD_DIM, *next_keys = keys + (int64_t)(block + BLOCK_KEYS) * HEAD_DIM;
    add_values<HEAD_DIM, QUERIES>(batch.acc, keep, score, value, next_keys, common);
    if constexpr (T > 1)  // what only later columns see must not touch earlier ones: a weight of 0 would not stop a NaN
      for (int c = 0; c < QUERIES; ++c)
        if (const int more = end[c] - (common > 0 ? common : 0); more > 0) {
          const float one = 1;
          add_values<HEAD_DIM, 1>(batch.acc + c, &one, (const float(*)[BLOCK_KEYS])(score[c] + end[c] - more),
                                  value + (int64_t)(end[c] - more) * HEAD_DIM, next_keys, more);
        }
  }
  for (int c = 0; c < QUERIES; ++c) {
    float* to = out[(first + c) / GROUP] + (first + c) % GROUP * out_stride;
    for (int d = 0; d < HEAD_DIM; ++d) to[d] = batch.acc[c][d];
    to[HEAD_DIM] = batch.top[c];
    to[HEAD_DIM + 1] = batch.total[c];
  }
}

// q[t]: the GROUP query heads of column t, [GROUP][HEAD_DIM]. out[t]: their partial results, HEAD_DIM accumulated values, the
// maximum score and the sum of weights, ``out_stride`` floats from head to head; 0, −∞, 0 where a column sees no key. The
// step's own keys and values are in the caches already, so that they need not be passed on their own here.
template <int GROUP, int HEAD_DIM, int T>
DEVICE void attend(const Worker& w, const float* const (&q)[T], const storage* keys, const storage* values,
                   const float* const (&)[T], const float* const (&)[T], AttentionSpan span, float scale, float softcap,
                   float* const (&out)[T], int out_stride) {
  constexpr int QUERIES = GROUP * T, REST = QUERIES % 4;
  int first = 0;
  for (; first + 4 <= QUERIES; first += 4)
    attend_batch<GROUP, HEAD_DIM, T, 4>(w, first, q, keys, values, span, scale, softcap, out, out_stride);
  if constexpr (REST > 0)
    attend_batch<GROUP, HEAD_DIM, T, REST>(w, first, q, keys, values, span, scale, softcap, out, out_stride);
}
