// Attention of one key/value head over a span of cache positions for GROUP query heads, by matrix instructions: sixteen positions
// at a time, warp by warp. Keys and values come through the ring, a few dozen positions a chunk. The scores' A holds the queries:
// high parts in its rows 0 to 7, low parts in rows 8 to 15; its B eight positions' keys. The weights then stand in the right lanes
// to be the A of the second product, high and low parts again, with the values as its B. The step's own position, which is not in
// the cache yet, is one query's for each of the last warps, value by value. Each warp has a running maximum of its own; in the end
// they agree on the largest and add up what they have gathered.

// Whether heads go through matrix instructions; the others are taken value by value.
template <int GROUP, int HEAD_DIM>
constexpr bool BY_MATRIX = sizeof(storage) == 2 && HEAD_DIM % 16 == 0 && HEAD_DIM <= 256 && GROUP <= 8;

DEVICE void load_matrices(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(row));
}
DEVICE void load_matrices_turned(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(row));
}

// Heads are cut: CUTS neighbouring warps take the same positions, and each of them WIDTH of the values; so that a warp has registers
// enough, and the parts of all teams of warps fit into the memory in which they meet, if that can be.
template <int GROUP, int HEAD_DIM>
struct HeadCuts {
  static constexpr int ROOM = sizeof(Shared::dots) / 2 / sizeof(float);
  DEVICE_MEMBER static constexpr bool fits(int n) { return HEAD_DIM / n <= 64 && (CONSUMER_WARPS / n + 1) * GROUP * (HEAD_DIM + 3) <= ROOM; }
  DEVICE_MEMBER static constexpr int cuts(int n) { return !fits(n) && n < CONSUMER_WARPS && HEAD_DIM % (32 * n) == 0 ? cuts(2 * n) : n; }
  static constexpr int CUTS = cuts(1), WIDTH = HEAD_DIM / CUTS, TEAMS = CONSUMER_WARPS / CUTS;
};

// What a warp has gathered: for query lane / 4 the largest score, the lane's part of the sum of weights, and Σ weight · value
// (high weights, then low) of its values 8 · block + 2 · (lane mod 4) and the next.
template <int GROUP, int HEAD_DIM>
struct Gathered {
  float top = NOTHING, total = 0, acc[HeadCuts<GROUP, HEAD_DIM>::WIDTH / 8][4] = {};
};

// The queries as A, scaled: a lane's parts, held where there are registers for them, else made again for every block of positions.
template <class Stored, int GROUP, int HEAD_DIM>
struct Queries {
  static constexpr bool HELD = HEAD_DIM / 4 + HeadCuts<GROUP, HEAD_DIM>::WIDTH / 2 <= 80;
  const float* own;
  float scale;
  uint4 held[HELD ? HEAD_DIM / 16 : 1];
  DEVICE_MEMBER Queries(const float* q, float scale) : own(q + threadIdx.x % 32 / 4 * HEAD_DIM + threadIdx.x % 4 * 2), scale(scale) {
    if constexpr (HELD)
      UNROLL for (int k = 0; k < HEAD_DIM / 16; ++k) held[k] = part(k);
  }
  DEVICE_MEMBER uint4 at(int k) const {
    if constexpr (HELD) return held[k];
    else return part(k);
  }
  DEVICE_MEMBER uint4 part(int k) const {
    float2 first = {}, second = {};
    if (threadIdx.x % 32 / 4 < GROUP) first = *(const float2*)(own + 16 * k), second = *(const float2*)(own + 16 * k + 8);
    first = {first.x * scale, first.y * scale}, second = {second.x * scale, second.y * scale};
    const uint32_t x = Pair<Stored>::pack(first), z = Pair<Stored>::pack(second);
    const float2 a = Pair<Stored>::unpack(x), b = Pair<Stored>::unpack(z);
    return {x, Pair<Stored>::pack({first.x - a.x, first.y - a.y}), z, Pair<Stored>::pack({second.x - b.x, second.y - b.y})};
  }
};

// Sixteen positions, of which those before ``seen`` count, the first of them at context position ``position``.
template <class Stored, int GROUP, int HEAD_DIM>
DEVICE void take_positions(Gathered<GROUP, HEAD_DIM>& found, const Queries<Stored, GROUP, HEAD_DIM>& queries, uint32_t keys, uint32_t values, int position, int seen, float softcap) {
  typedef CacheRow<HEAD_DIM> Cached;
  const int lane = threadIdx.x % 32;
  float score[2][4] = {};
  {
    const int row = lane / 16 * 8 + lane % 8, granule = lane / 8 % 2;
    UNROLL for (int k = 0; k < HEAD_DIM / 16; ++k) {
      uint32_t key[4];
      load_matrices(key, keys + row * Cached::BYTES + Cached::granule(2 * k + granule, position + row) * 16);
      const uint4 query = queries.at(k);
      Pair<Stored>::multiply(score[0], query, {key[0], key[1]});
      Pair<Stored>::multiply(score[1], query, {key[2], key[3]});
    }
  }
  float s[4] = {score[0][0] + score[0][2], score[0][1] + score[0][3], score[1][0] + score[1][2], score[1][1] + score[1][3]};
  float top = found.top;
  UNROLL for (int i = 0; i < 4; ++i) {
    if (softcap > 0) s[i] = softcap * tanhf(s[i] / softcap);
    if (lane % 4 * 2 + i / 2 * 8 + i % 2 >= seen) s[i] = NOTHING;
    top = fmaxf(top, s[i]);
  }
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  const float keep = found.top == NOTHING ? 0.0f : __expf(found.top - top);
  found.top = top;
  found.total *= keep;
  UNROLL for (int i = 0; i < 4; ++i) s[i] = __expf(s[i] - top), found.total += s[i];
  typedef HeadCuts<GROUP, HEAD_DIM> Cuts;
  constexpr int BLOCKS = Cuts::WIDTH / 8;
  UNROLL for (int block = 0; block < BLOCKS; ++block)
    UNROLL for (int i = 0; i < 4; ++i) found.acc[block][i] *= keep;
  uint4 weights;
  weights.x = Pair<Stored>::pack({s[0], s[1]}), weights.z = Pair<Stored>::pack({s[2], s[3]});
  const float2 x = Pair<Stored>::unpack(weights.x), z = Pair<Stored>::unpack(weights.z);
  weights.y = Pair<Stored>::pack({s[0] - x.x, s[1] - x.y}), weights.w = Pair<Stored>::pack({s[2] - z.x, s[3] - z.y});
  const int row = lane % 16, granule = lane / 16 + threadIdx.x / 32 % Cuts::CUTS * BLOCKS;
  UNROLL for (int block = 0; block < BLOCKS; block += 2) {
    uint32_t value[4];
    load_matrices_turned(value, values + row * Cached::BYTES + Cached::granule(block + granule, position + row) * 16);
    Pair<Stored>::multiply(found.acc[block], weights, {value[0], value[1]});
    Pair<Stored>::multiply(found.acc[block + 1], weights, {value[2], value[3]});
  }
}

// ── what the warps have gathered ──

// A part is HEAD_DIM accumulated values, the largest score, the sum of weights; and, of the first part, the largest score of all.
// There is one for the positions of each team, and one for the step's own; of so many queries at a time as fit into the memory in
// which warps meet.
template <int GROUP, int HEAD_DIM>
struct Parts {
  typedef HeadCuts<GROUP, HEAD_DIM> Cuts;
  static constexpr int OWN = Cuts::TEAMS, PARTS = OWN + 1, WORDS = HEAD_DIM + 3, FIT = Cuts::ROOM / (PARTS * WORDS), QUERIES = FIT < GROUP ? FIT : GROUP;
  static_assert(FIT > 0, "a head is too wide for the memory its warps meet in");
  float* room;  // the half of that memory that is free
  DEVICE_MEMBER float* of(int query, int part) const { return room + (query % QUERIES * PARTS + part) * WORDS; }
  // The largest score of a query, once all parts have theirs.
  DEVICE_MEMBER float top(int query) const {
    float top = NOTHING;
    UNROLL for (int part = 0; part < PARTS; ++part) top = fmaxf(top, of(query, part)[HEAD_DIM]);
    return top;
  }
};

// What a score weighs beside the largest.
DEVICE float weight_of(float score, float top) { return score == NOTHING ? 0.0f : __expf(score - top); }

// The query of which this warp takes the step's own position: the last warp the first one's; and its score.
struct OwnPosition {
  int query;
  float score;
};
template <int GROUP, int HEAD_DIM>
DEVICE OwnPosition own_position(const float* q, const float* key, bool seen, float scale, float softcap) {
  const int lane = threadIdx.x % 32, query = CONSUMER_WARPS - 1 - threadIdx.x / 32;
  if (query >= GROUP) return {query, NOTHING};
  float score = 0;
  UNROLL for (int i = 0; i < HEAD_DIM; i += 32)
    if (HEAD_DIM % 32 == 0 || i + lane < HEAD_DIM) score = fmaf(q[query * HEAD_DIM + i + lane], key[i + lane], score);
  score = warp_sum(score) * scale;
  if (softcap > 0) score = softcap * tanhf(score / softcap);
  return {query, seen ? score : NOTHING};
}

// Say the largest scores of the queries from ``first`` on.
template <int GROUP, int HEAD_DIM>
DEVICE void put_tops(const Parts<GROUP, HEAD_DIM>& parts, const Gathered<GROUP, HEAD_DIM>& found, OwnPosition own, int first) {
  typedef HeadCuts<GROUP, HEAD_DIM> Cuts;
  const int lane = threadIdx.x % 32, query = lane / 4, warp = threadIdx.x / 32, end = first + parts.QUERIES < GROUP ? first + parts.QUERIES : GROUP;
  if (lane % 4 == 0 && warp % Cuts::CUTS == 0 && query >= first && query < end) parts.of(query, warp / Cuts::CUTS)[HEAD_DIM] = found.top;
  if (lane == 0 && own.query >= first && own.query < end) parts.of(own.query, parts.OWN)[HEAD_DIM] = own.score;
}

// And what has been gathered for them, weighed by the largest of all.
template <int GROUP, int HEAD_DIM>
DEVICE void put_parts(const Parts<GROUP, HEAD_DIM>& parts, const Gathered<GROUP, HEAD_DIM>& found, OwnPosition own, const float* value, int first) {
  typedef HeadCuts<GROUP, HEAD_DIM> Cuts;
  const int lane = threadIdx.x % 32, query = lane / 4, warp = threadIdx.x / 32, cut = warp % Cuts::CUTS, end = first + parts.QUERIES < GROUP ? first + parts.QUERIES : GROUP;
  if (query >= first && query < end) {
    const float top = parts.top(query), weight = weight_of(found.top, top);
    float* part = parts.of(query, warp / Cuts::CUTS);
    UNROLL for (int block = 0; block < Cuts::WIDTH / 8; ++block) {
      float* to = part + cut * Cuts::WIDTH + 8 * block + lane % 4 * 2;
      to[0] = (found.acc[block][0] + found.acc[block][2]) * weight, to[1] = (found.acc[block][1] + found.acc[block][3]) * weight;
    }
    if (lane % 4 == 0 && cut == 0) part[HEAD_DIM + 1] = found.total * weight;
    if (lane % 4 == 0 && warp == 0) part[HEAD_DIM + 2] = top;
  }
  if (own.query < first || own.query >= end) return;
  const float weight = weight_of(own.score, parts.top(own.query));
  float* part = parts.of(own.query, parts.OWN);
  UNROLL for (int i = 0; i < HEAD_DIM; i += 32)
    if (HEAD_DIM % 32 == 0 || i + lane < HEAD_DIM) part[i + lane] = weight == 0 ? 0.0f : value[i + lane] * weight;
  if (lane == 0) part[HEAD_DIM + 1] = weight;
}

template <int GROUP, int HEAD_DIM>
DEVICE void bring_together(const Parts<GROUP, HEAD_DIM>& parts, Row out, int out_stride, int first) {
  constexpr int PARTS = Parts<GROUP, HEAD_DIM>::PARTS;
  const int queries = GROUP - first < parts.QUERIES ? GROUP - first : parts.QUERIES;
  ROLLED for (int i = threadIdx.x; i < queries * HEAD_DIM; i += CONSUMERS) {
    const int query = first + i / HEAD_DIM, d = i % HEAD_DIM;
    float value = 0, total = 0;
    UNROLL for (int part = 0; part < PARTS; ++part) value += parts.of(query, part)[d];
    const Row to = out + query * out_stride;
    to.put(d, value);
    if (d != 0) continue;
    UNROLL for (int part = 0; part < PARTS; ++part) total += parts.of(query, part)[HEAD_DIM + 1];
    to.put(HEAD_DIM, parts.of(query, 0)[HEAD_DIM + 2]), to.put(HEAD_DIM + 1, total);
  }
}

// q: the GROUP query heads [GROUP][HEAD_DIM]. out: their partial results, HEAD_DIM accumulated values, the maximum score and the sum
// of weights, ``out_stride`` words from head to head; 0, −∞, 0 of an empty span.
template <int GROUP, int HEAD_DIM>
DEVICE_ONCE void attend_by_matrix(const float* q, const float* new_key, const float* new_value, AttentionSpan span, int now, float scale, float softcap,
                                  Row out, int out_stride) {
  constexpr int ROW_BYTES = CacheRow<HEAD_DIM>::BYTES, POSITIONS = chunk_positions(ROW_BYTES), BLOCK = 16;
  static_assert(POSITIONS >= BLOCK, "a chunk holds fewer positions than are taken at a time");
  typedef HeadCuts<GROUP, HEAD_DIM> Cuts;
  Worker w;
  const int team = threadIdx.x / 32 / Cuts::CUTS, count = cached_positions(span, now), meetings = w.meetings;
  const OwnPosition own = own_position<GROUP, HEAD_DIM>(q, new_key, span.first <= now && now < span.last, scale, softcap);
  const Queries<storage, GROUP, HEAD_DIM> queries(q, scale);
  Gathered<GROUP, HEAD_DIM> found;
  Stream s = open_stream();
  next_chunk(s);
  int turn = 0;
  ROLLED for (int done = 0; done < count; done += POSITIONS) {
    land(s, 0);
    const uint32_t keys = shared_address(shared_memory + RING_BEGIN) + s.unit, values = keys + POSITIONS * ROW_BYTES;
    const int here = count - done < POSITIONS ? count - done : POSITIONS;
    ROLLED for (int block = 0; block < here; block += BLOCK, ++turn)
      if (turn % Cuts::TEAMS == team)
        take_positions<storage>(found, queries, keys + block * ROW_BYTES, values + block * ROW_BYTES, span.first + done + block, here - block, softcap);
    next_unit(s, CHUNK_BYTES);
    release(s, 0);
  }
  close_stream(s);
  found.total += __shfl_xor_sync(~0u, found.total, 1);
  found.total += __shfl_xor_sync(~0u, found.total, 2);
  const Parts<GROUP, HEAD_DIM> parts = {&shared_state().dots[meetings & 1][0][0]};
  ROLLED for (int first = 0; first < GROUP; first += parts.QUERIES) {
    if (first > 0) worker_sync();
    put_tops(parts, found, own, first);
    worker_sync();
    put_parts(parts, found, own, new_value, first);
    worker_sync();
    bring_together(parts, out, out_stride, first);
  }
  w.meetings = meetings + 1;
}

template <int GROUP, int HEAD_DIM, int T>
DEVICE void attend(Worker& w, const float* const (&q)[T], const storage*, const storage*, const float* const (&new_keys)[T],
                   const float* const (&new_values)[T], AttentionSpan span, float scale, float softcap, const Row (&out)[T], int out_stride) {
  static_assert(T == 1, "this machine layer takes one token a step");
  if constexpr (BY_MATRIX<GROUP, HEAD_DIM>) attend_by_matrix<GROUP, HEAD_DIM>(q[0], new_keys[0], new_values[0], span, w.position[0], scale, softcap, out[0], out_stride);
  else attend_by_value<GROUP, HEAD_DIM>(w, q[0], new_keys[0], new_values[0], span, scale, softcap, out[0], out_stride);
}
