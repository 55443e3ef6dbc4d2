// Attention of heads that matrix instructions do not take (attention.cuh): fp32 caches, odd head_dims, more than eight query heads to
// a key/value head. A key is read by a few neighbouring lanes; each such set of lanes takes keys of its own, with a running
// maximum of its own, and the sets are brought together at the end. Of many query heads a warp takes a share.

// How a head is cut over lanes: LANES lanes a key, OWN values a lane, read PART at a time.
template <int HEAD_DIM>
struct HeadCut {
  typedef CacheRow<HEAD_DIM> Cached;
  DEVICE_MEMBER static constexpr int lanes(int n) { return n < 32 && HEAD_DIM % (2 * n) == 0 && HEAD_DIM / (2 * n) >= 8 ? lanes(2 * n) : n; }
  DEVICE_MEMBER static constexpr int part(int n) { return n > 1 && (OWN % n || n * (int)sizeof(storage) > 16) ? part(n / 2) : n; }
  static constexpr int LANES = lanes(1), OWN = HEAD_DIM / LANES, PART = part(8);
  // Which of the head's values is this lane's i-th.
  DEVICE_MEMBER static int index(int i) { return (i / PART * LANES + threadIdx.x % LANES) * PART + i % PART; }
};

// How many of a key's queries a warp takes: as many as its registers hold beside keys and values. Where it is not all of them, SHARES
// neighbouring warps take the same keys, each for QUERIES of its own; there are SETS sets of lanes for each share.
template <int GROUP, int HEAD_DIM>
struct QueryCut {
  typedef HeadCut<HEAD_DIM> Cut;
  static constexpr int ROOM = 140;  // floats of a lane
  DEVICE_MEMBER static constexpr int queries(int n) { return (GROUP + n - 1) / n; }
  DEVICE_MEMBER static constexpr int shares(int n) {
    return n < CONSUMER_WARPS && queries(n) > 1 && queries(n) * (Cut::OWN + 2) + 5 * Cut::OWN > ROOM ? shares(2 * n) : n;
  }
  static constexpr int SHARES = shares(1), QUERIES = queries(SHARES), SETS = CONSUMERS / Cut::LANES / SHARES, WARPS = CONSUMER_WARPS / SHARES;
  DEVICE_MEMBER static int share() { return threadIdx.x / 32 % SHARES; }
  DEVICE_MEMBER static int warp() { return threadIdx.x / 32 / SHARES; }
  DEVICE_MEMBER static int set() { return warp() * (32 / Cut::LANES) + threadIdx.x % 32 / Cut::LANES; }
  // The share's i-th query; behind the last one, the last one again.
  DEVICE_MEMBER static int query(int i) {
    const int at = share() * QUERIES + i;
    return QUERIES * SHARES == GROUP || at < GROUP ? at : GROUP - 1;
  }
};

// Values of a key or value row that this lane holds, widened.
template <class Cut>
DEVICE void read_cached(float (&own)[Cut::OWN], const storage* row, int position) {
  UNROLL for (int i = 0; i < Cut::OWN; i += Cut::PART) {
    struct alignas(Cut::PART * sizeof(storage)) Part { storage values[Cut::PART]; };
    const Part part = *(const Part*)(row + Cut::Cached::value(Cut::index(i), position));
    UNROLL for (int j = 0; j < Cut::PART; ++j) own[i + j] = widen(part.values[j]);
  }
}
template <class Cut>
DEVICE void read_row(float (&own)[Cut::OWN], const float* row) {
  UNROLL for (int i = 0; i < Cut::OWN; ++i) own[i] = row[Cut::index(i)];
}

// What a set of lanes has gathered for one query: Σ weight · value, the largest score, the sum of weights.
template <int OWN>
struct SetGathered {
  float acc[OWN], top, total;
  DEVICE_MEMBER void scale(float new_top) {
    const float keep = top == NOTHING ? 0.0f : __expf(top - new_top);
    UNROLL for (int i = 0; i < OWN; ++i) acc[i] *= keep;
    total *= keep;
    top = new_top;
  }
};

template <class Cut>
DEVICE float sum_over_head(float x) {
  UNROLL for (int lanes = Cut::LANES / 2; lanes; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
  return x;
}

// Take in AT_ONCE keys and their values for the share's queries; ``seen`` says which keys count.
template <class Queries, int AT_ONCE, class Cut = typename Queries::Cut>
DEVICE void take_keys(SetGathered<Cut::OWN> (&found)[Queries::QUERIES], const float* q, const float (&key)[AT_ONCE][Cut::OWN],
                      const float (&value)[AT_ONCE][Cut::OWN], const bool (&seen)[AT_ONCE], float scale, float softcap) {
  UNROLL for (int c = 0; c < Queries::QUERIES; ++c) {
    float query[Cut::OWN], score[AT_ONCE], top = found[c].top;
    read_row<Cut>(query, q + Queries::query(c) * Cut::LANES * Cut::OWN);
    UNROLL for (int i = 0; i < AT_ONCE; ++i) {
      float part = 0;
      UNROLL for (int d = 0; d < Cut::OWN; ++d) part = fmaf(query[d], key[i][d], part);
      score[i] = sum_over_head<Cut>(part) * scale;
      if (softcap > 0) score[i] = softcap * tanhf(score[i] / softcap);
      if (!seen[i]) score[i] = NOTHING;
      top = fmaxf(top, score[i]);
    }
    if (top == NOTHING) continue;
    if (top > found[c].top) found[c].scale(top);
    UNROLL for (int i = 0; i < AT_ONCE; ++i) {
      const float weight = __expf(score[i] - top);
      found[c].total += weight;
      UNROLL for (int d = 0; d < Cut::OWN; ++d) found[c].acc[d] = fmaf(weight, value[i][d], found[c].acc[d]);
    }
  }
}

// All sets' results for each query into one: first within the warps, then across them through shared memory.
template <int HEAD_DIM, int GROUP>
DEVICE void bring_sets_together(Worker& w, SetGathered<HeadCut<HEAD_DIM>::OWN> (&found)[QueryCut<GROUP, HEAD_DIM>::QUERIES], Row out, int out_stride) {
  typedef HeadCut<HEAD_DIM> Cut;
  typedef QueryCut<GROUP, HEAD_DIM> Queries;
  constexpr int PART = HEAD_DIM + 2, ROOM = sizeof(Shared::dots) / 4 / (CONSUMER_WARPS * PART), TAKEN = ROOM < Queries::QUERIES ? ROOM : Queries::QUERIES;
  static_assert(TAKEN > 0, "a head is too wide for the memory its warps meet in");
  UNROLL for (int c = 0; c < Queries::QUERIES; ++c)
    UNROLL for (int lanes = Cut::LANES; lanes < 32; lanes *= 2) {
      const float top = fmaxf(found[c].top, __shfl_xor_sync(~0u, found[c].top, lanes));
      if (top != NOTHING) found[c].scale(top);  // the same for all lanes that meet here
      found[c].total += __shfl_xor_sync(~0u, found[c].total, lanes);
      UNROLL for (int i = 0; i < Cut::OWN; ++i) found[c].acc[i] += __shfl_xor_sync(~0u, found[c].acc[i], lanes);
    }
  float* room = &shared_state().dots[0][0][0];  // [TAKEN][SHARES][WARPS][PART]
  UNROLL for (int first = 0; first < Queries::QUERIES; first += TAKEN) {
    worker_sync(w);
    UNROLL for (int c = first; c < Queries::QUERIES && c < first + TAKEN; ++c) {
      float* part = room + (((c - first) * Queries::SHARES + Queries::share()) * Queries::WARPS + Queries::warp()) * PART;
      if (w.thread % 32 < Cut::LANES) {
        UNROLL for (int i = 0; i < Cut::OWN; ++i) part[Cut::index(i)] = found[c].acc[i];
      }
      if (w.thread % 32 == 0) part[HEAD_DIM] = found[c].top, part[HEAD_DIM + 1] = found[c].total;
    }
    worker_sync(w);
    const int queries = Queries::QUERIES - first < TAKEN ? Queries::QUERIES - first : TAKEN;
    for (int i = w.thread; i < queries * Queries::SHARES * HEAD_DIM; i += CONSUMERS) {
      const int c = i / HEAD_DIM, d = i % HEAD_DIM, query = c % Queries::SHARES * Queries::QUERIES + first + c / Queries::SHARES;
      if (query >= GROUP) continue;
      const float* parts = room + c * Queries::WARPS * PART;
      float top = NOTHING, total = 0, value = 0;
      UNROLL for (int warp = 0; warp < Queries::WARPS; ++warp) top = fmaxf(top, parts[warp * PART + HEAD_DIM]);
      UNROLL for (int warp = 0; warp < Queries::WARPS; ++warp) {
        const float most = parts[warp * PART + HEAD_DIM], weight = most == NOTHING ? 0.0f : __expf(most - top);
        total = fmaf(weight, parts[warp * PART + HEAD_DIM + 1], total);
        value = fmaf(weight, parts[warp * PART + d], value);
      }
      const Row to = out + query * out_stride;
      to.put(d, value);
      if (d == 0) to.put(HEAD_DIM, top), to.put(HEAD_DIM + 1, total);
    }
  }
  worker_sync(w);  // the next dots go where the parts were
}

template <int GROUP, int HEAD_DIM>
DEVICE void attend_by_value(Worker& w, const float* q, const float* new_key, const float* new_value, AttentionSpan span, float scale, float softcap,
                            Row out, int out_stride) {
  typedef HeadCut<HEAD_DIM> Cut;
  typedef QueryCut<GROUP, HEAD_DIM> Queries;
  constexpr int ROW_BYTES = Cut::Cached::BYTES, ROW = ROW_BYTES / sizeof(storage), POSITIONS = chunk_positions(ROW_BYTES), AT_ONCE = KEYS_AT_ONCE;
  static_assert(POSITIONS > 0, "a cache row is larger than half a chunk");
  SetGathered<Cut::OWN> found[Queries::QUERIES];
  UNROLL for (int c = 0; c < Queries::QUERIES; ++c) found[c] = {{}, NOTHING, 0};
  const int set = Queries::set(), now = w.position[0], count = cached_positions(span, now);

  // Behind the cached positions comes the step's own, if it is in the span.
  const int all = count + (span.first <= now && now < span.last ? 1 : 0);
  Stream s = open_stream();
  next_chunk(s);
  for (int done = 0; done < all; done += POSITIONS) {
    if (done < count) land(s, 0);
    const storage* keys = (const storage*)(shared_memory + RING_BEGIN + s.unit);
    const storage* values = keys + POSITIONS * ROW;
    const int here = all - done < POSITIONS ? all - done : POSITIONS;
    ROLLED for (int block = 0; block < here; block += AT_ONCE * Queries::SETS) {  // the same number of turns in all lanes
      float key[AT_ONCE][Cut::OWN], value[AT_ONCE][Cut::OWN];
      bool seen[AT_ONCE];
      UNROLL for (int i = 0; i < AT_ONCE; ++i) {
        const int row = block + i * Queries::SETS + set;
        seen[i] = row < here;
        if (seen[i] && done + row < count) {
          read_cached<Cut>(key[i], keys + row * ROW, span.first + done + row);
          read_cached<Cut>(value[i], values + row * ROW, span.first + done + row);
        } else {  // what is not seen must be finite: 0 · NaN is none
          read_row<Cut>(key[i], new_key);
          read_row<Cut>(value[i], new_value);
        }
      }
      take_keys<Queries>(found, q, key, value, seen, scale, softcap);
    }
    __syncwarp();
    if (done >= count) break;
    next_unit(s, CHUNK_BYTES);
    release(s, 0);
  }
  close_stream(s);
  bring_sets_together<HEAD_DIM, GROUP>(w, found, out, out_stride);
}
