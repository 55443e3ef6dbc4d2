// Units of the stream: dots of their rows with a vector, handed row by row to what comes after.

// A unit fills whole rows: its last one with zeros.
template <int ARITY, int K>
constexpr int UNIT_BYTES = UNIT_ROWS<K> * ARITY * PIECE_BYTES;

// One warp's B of every step that it takes: in registers when they are few, else read again for every unit.
template <class Stored, int ARITY, int ROWS, bool HELD_ = sizeof(Stored) == 2 && ROWS <= 4>
struct Steps {
  static constexpr bool HELD = HELD_;
  static constexpr int STEPS = ROW_K / STEP_K<ARITY>;
  const Reader<Stored, ARITY> read;
  uint2 held[HELD ? ROWS : 1][STEPS];
  DEVICE_MEMBER Steps(const float* x, int warp, int warps) : read(x) {
    if constexpr (HELD)
      UNROLL for (int row = 0; row < ROWS; ++row)
        UNROLL for (int step = 0; step < STEPS; ++step) held[row][step] = read.at(warp + row * warps, step);
  }
  // The B of ``step`` of the warp's ``mine``-th row, which is number ``row`` of the unit.
  DEVICE_MEMBER auto at(int mine, int row, int step) const {
    if constexpr (HELD) return held[mine][step];
    else return read.at(row, step);
  }
};

// The same of a vector that a warp has just taken in and that no other will read: it never leaves the registers. Of a row, lanes 0 to
// 15 have the first 64 values and the others the last; in B the lower lanes have high parts and the upper ones low parts.
template <class Stored, int ROWS>
struct HeldSteps {
  static constexpr bool HELD = true;
  uint2 held[ROWS][2];
  template <int K, int WARPS>
  DEVICE_MEMBER float take(const Slice<K, WARPS>& own) {
    float scale;
    const float power = common_power(own, scale);
    const bool upper = threadIdx.x % 32 >= 16;
    UNROLL for (int i = 0; i < ROWS; ++i) {
      const Halves h = halves<Stored>(own.rows[i], scale);
      const uint2 away = upper ? h.high : h.low, other = {__shfl_xor_sync(~0u, away.x, 16), __shfl_xor_sync(~0u, away.y, 16)};
      held[i][0] = upper ? other : h.high;
      held[i][1] = upper ? h.low : other;
    }
    return power;
  }
  DEVICE_MEMBER uint2 at(int mine, int, int step) const { return held[mine][step]; }
};

// How the rows of a unit stand in the stream and which of it a warp takes. They stand in groups of eight, of which all first
// pieces come first; the last group may be smaller. FULL pieces of a warp are in whole groups, the n-th of them number
// n · WARPS + warp of the unit.
template <int ARITY, int K, int WARPS>
struct Share {
  static constexpr int TEAMS = CONSUMER_WARPS / WARPS, GROUPS = UNIT_ROWS<K> / CONSUMER_WARPS, REST = UNIT_ROWS<K> % CONSUMER_WARPS;
  static constexpr int FULL = GROUPS * ARITY * TEAMS, ROWS = (GROUPS + (REST > 0)) * TEAMS;
  // How many pieces are taken at once, and of how many units: few pieces at a time would leave a warp waiting for each of them.
  static constexpr int AT_ONCE = sizeof(storage) == 4 ? 2 : 4, UNITS = TEAMS == 1 && 2 * FULL <= AT_ONCE && REST == 0 ? 2 : 1;
  typedef Steps<storage, ARITY, ROWS> B;
  DEVICE_MEMBER static int mine(int n) { return n / (ARITY * TEAMS) * TEAMS + n % TEAMS; }
  DEVICE_MEMBER static int row(int n, int warp) { return n / (ARITY * TEAMS) * CONSUMER_WARPS + n % TEAMS * WARPS + warp; }
  DEVICE_MEMBER static int step(int n) { return n / TEAMS % ARITY * PIECE_FRAGMENTS; }
};

// Where in the ring byte ``at`` of the unit under way is. Units are whole pieces, and so is the ring: no piece goes around it.
template <int BYTES>
DEVICE uint32_t place_of(const Stream& s, int at) {
  uint32_t place = s.unit + at;
  UNROLL for (uint32_t rounds = 0; rounds <= BYTES / RING_BYTES; ++rounds) place = around(place);
  return place;
}

DEVICE void load_piece(Fragment (&weights)[PIECE_FRAGMENTS], uint32_t place) {
  UNROLL for (int f = 0; f < PIECE_FRAGMENTS; ++f) weights[f] = load_fragment(place + f * FRAGMENT_BYTES);
}

// COUNT pieces of whole groups, from the warp's n-th on, of each of UNITS units.
template <int UNITS, int COUNT, int ARITY, int K, int WARPS, class B>
DEVICE void take_pieces(Dot<storage, ARITY> (&dot)[UNITS], Stream& s, uint32_t ring, const B& b, int n, int warp) {
  typedef Share<ARITY, K, WARPS> Own;
  constexpr int BYTES = UNIT_BYTES<ARITY, K>;
  const int first = (n * WARPS + warp) * PIECE_BYTES, last = (UNITS - 1) * BYTES + first + (COUNT - 1) * WARPS * PIECE_BYTES;
  land(s, last);
  Fragment weights[UNITS][COUNT][PIECE_FRAGMENTS];
  UNROLL for (int u = 0; u < UNITS; ++u)
    UNROLL for (int c = 0; c < COUNT; ++c) load_piece(weights[u][c], ring + place_of<UNITS * BYTES>(s, u * BYTES + first + c * WARPS * PIECE_BYTES));
  UNROLL for (int c = 0; c < COUNT; ++c)
    UNROLL for (int f = 0; f < PIECE_FRAGMENTS; ++f)
      UNROLL for (int u = 0; u < UNITS; ++u)
        dot[u].add(f, weights[u][c][f], b.at(Own::mine(n + c), Own::row(n + c, warp), Own::step(n + c) + f));
  release(s, last + PIECE_BYTES);
}

// The pieces of the last group, when it is smaller than the others: COUNT rows of it from the warp's own row ``row`` on.
template <int COUNT, int ARITY, int K, int WARPS, class B>
DEVICE void take_rest_rows(Dot<storage, ARITY>& dot, const Stream& s, uint32_t ring, const B& b, int row) {
  typedef Share<ARITY, K, WARPS> Own;
  constexpr int FIRST = Own::GROUPS * CONSUMER_WARPS;
  UNROLL for (int piece = 0; piece < ARITY; ++piece) {
    Fragment weights[COUNT][PIECE_FRAGMENTS];
    UNROLL for (int i = 0; i < COUNT; ++i)
      load_piece(weights[i], ring + place_of<UNIT_BYTES<ARITY, K>>(s, (FIRST * ARITY + piece * Own::REST + i * WARPS + row) * PIECE_BYTES));
    UNROLL for (int i = 0; i < COUNT; ++i)
      UNROLL for (int f = 0; f < PIECE_FRAGMENTS; ++f)
        dot.add(f, weights[i][f], b.at(Own::GROUPS * Own::TEAMS + (row + i * WARPS) / WARPS, FIRST + row + i * WARPS, piece * PIECE_FRAGMENTS + f));
  }
}
template <int ARITY, int K, int WARPS, class B>
DEVICE void take_rest(Dot<storage, ARITY>& dot, Stream& s, uint32_t ring, const B& b, int warp) {
  constexpr int REST = Share<ARITY, K, WARPS>::REST, FULL = sizeof(storage) == 4 ? 0 : REST / WARPS;
  land(s, UNIT_BYTES<ARITY, K> - 1);
  if constexpr (FULL > 0) take_rest_rows<FULL, ARITY, K, WARPS>(dot, s, ring, b, warp);
  UNROLL for (int row = FULL * WARPS; row < REST; row += WARPS)
    if (row + warp < REST) take_rest_rows<1, ARITY, K, WARPS>(dot, s, ring, b, row + warp);
}

// A warp's part of a unit's dots, into ``dots`` [ARITY][TILE_ROWS].
template <int ARITY>
DEVICE void put_dots(const Dot<storage, ARITY>& dot, float rescale, float* dots) {
  const int lane = threadIdx.x % 32;
  const float total = dot.sum() * rescale;
  if (lane % 4 == 0 && lane / 4 < ARITY * TILE_ROWS) dots[lane / 4] = total;
}

// UNITS units, into ``dots`` [UNITS][ARITY][TILE_ROWS].
template <int UNITS, int ARITY, int K, int WARPS, class B>
DEVICE void take_units(Stream& s, uint32_t ring, const B& b, float rescale, float* dots) {
  typedef Share<ARITY, K, WARPS> Own;
  const int warp = threadIdx.x / 32 % WARPS;
  Dot<storage, ARITY> dot[UNITS];
  constexpr int ROUNDS = Own::FULL / Own::AT_ONCE, LEFT = Own::FULL % Own::AT_ONCE;
  if constexpr (B::HELD) {
    UNROLL for (int i = 0; i < ROUNDS; ++i) take_pieces<UNITS, Own::AT_ONCE, ARITY, K, WARPS>(dot, s, ring, b, i * Own::AT_ONCE, warp);
  } else {
    ROLLED for (int i = 0; i < ROUNDS; ++i) take_pieces<UNITS, Own::AT_ONCE, ARITY, K, WARPS>(dot, s, ring, b, i * Own::AT_ONCE, warp);
  }
  if constexpr (LEFT > 0) take_pieces<UNITS, LEFT, ARITY, K, WARPS>(dot, s, ring, b, ROUNDS * Own::AT_ONCE, warp);
  if constexpr (Own::REST > 0) take_rest<ARITY, K, WARPS>(dot[0], s, ring, b, warp);
  next_unit(s, UNITS * UNIT_BYTES<ARITY, K>);
  if constexpr (Own::FULL == 0) release(s, 0);  // a rest gives nothing back
  UNROLL for (int u = 0; u < UNITS; ++u) put_dots(dot[u], rescale, dots + u * ARITY * TILE_ROWS);
}

// Where this lane reads its weights in the ring's first fragment.
DEVICE uint32_t ring_of_lane() { return shared_address(shared_memory + RING_BEGIN) + threadIdx.x % 32 * 8 * sizeof(storage); }

// What a warp takes of a stage's first units before their vector is there: registers make the ring deeper. All workers that have
// any unit have LEAST of them.
template <int ARITY, int K, int WARPS, int LEAST>
struct Drained {
  typedef Share<ARITY, K, WARPS> Own;
  static constexpr int EACH = Own::FULL * PIECE_FRAGMENTS, BYTES = UNIT_BYTES<ARITY, K>;
  static constexpr int FIT = sizeof(storage) == 2 && Own::TEAMS == 1 && Own::REST == 0 && Own::ROWS <= DRAINED_ROWS ? DRAIN / EACH : 0, UNITS = FIT < LEAST ? FIT : LEAST;
  Fragment weights[UNITS > 0 ? UNITS : 1][EACH > 0 ? EACH : 1];
  DEVICE_MEMBER void take() {
    if constexpr (UNITS > 0) {
      Stream s = open_stream();
      const uint32_t ring = ring_of_lane();
      UNROLL for (int u = 0; u < UNITS; ++u) {
        if (u > 0) release(s, 0);
        land(s, BYTES - 1);
        UNROLL for (int i = 0; i < EACH; ++i) {
          const int piece = i / PIECE_FRAGMENTS * WARPS + threadIdx.x / 32, fragment = i % PIECE_FRAGMENTS;
          weights[u][i] = load_fragment(ring + place_of<BYTES>(s, piece * PIECE_BYTES) + fragment * FRAGMENT_BYTES);
        }
        next_unit(s, BYTES);
      }
      close_stream(s);
    }
  }
  // Their dots, once the vector is there.
  template <class B>
  DEVICE_MEMBER void finish(const B& b, float rescale, float* dots) const {
    const int warp = threadIdx.x / 32;
    UNROLL for (int u = 0; u < UNITS; ++u) {
      Dot<storage, ARITY> dot;
      UNROLL for (int i = 0; i < EACH; ++i) {
        const int n = i / PIECE_FRAGMENTS, f = i % PIECE_FRAGMENTS;
        dot.add(f, weights[u][i], b.at(Own::mine(n), Own::row(n, warp), Own::step(n) + f));
      }
      put_dots(dot, rescale, dots + u * ARITY * TILE_ROWS);
    }
  }
};

// This warp's share of units ``from`` … ``units``, of which teams of warps take turns, into ``dots`` [units][ARITY][TILE_ROWS].
// ``turn``: how many units the teams have taken before.
template <int ARITY, int K, int WARPS, class B>
DEVICE void take_all_units(Stream& s, uint32_t ring, const B& b, float rescale, int from, int units, int turn, float* dots) {
  typedef Share<ARITY, K, WARPS> Own;
  const int team = threadIdx.x / 32 / WARPS;
  const bool bulk = threadIdx.x == 0 && units * UNIT_BYTES<ARITY, K> >= BULK_BYTES;
  if (bulk) *(volatile uint32_t*)&shared_state().window = at_most(BULK_WINDOW);
  int unit = from;
  if constexpr (Own::UNITS > 1)
    ROLLED for (; unit + Own::UNITS <= units; unit += Own::UNITS) take_units<Own::UNITS, ARITY, K, WARPS>(s, ring, b, rescale, dots + unit * ARITY * TILE_ROWS);
  if constexpr (Own::TEAMS == 1) {
    ROLLED for (; unit < units; ++unit) take_units<1, ARITY, K, WARPS>(s, ring, b, rescale, dots + unit * ARITY * TILE_ROWS);
  } else {
    int next = unit + ((team - turn - unit) & (Own::TEAMS - 1));
    ROLLED for (; next < units; next += Own::TEAMS) {
      pass_over(s, (next - unit) * UNIT_BYTES<ARITY, K>);
      take_units<1, ARITY, K, WARPS>(s, ring, b, rescale, dots + next * ARITY * TILE_ROWS);
      unit = next + 1;
    }
    pass_over(s, (units - unit) * UNIT_BYTES<ARITY, K>);
  }
  close_stream(s);
  if (bulk) *(volatile uint32_t*)&shared_state().window = at_most(WINDOW);
}

// Of a vector that is packed.
template <int ARITY, int K, int WARPS>
DEVICE_ONCE void dot_units(const float* x, float rescale, int units, int turn, float* dots) {
  const typename Share<ARITY, K, WARPS>::B b(x, threadIdx.x / 32 % WARPS, WARPS);
  Stream s = open_stream();
  take_all_units<ARITY, K, WARPS>(s, ring_of_lane(), b, rescale, 0, units, turn, dots);
}

// Of a vector on its way, which stays in registers. ``first``: what has been taken of the weights.
template <int K, int WARPS, class First>
DEVICE void dot_held(const First& first, const uint32_t* words, uint32_t tag, int units, float* dots) {
  Slice<K, WARPS> own;
  poll_slice(own, words, tag);
  stamp(1);
  HeldSteps<storage, Slice<K, WARPS>::MINE> b;
  const float rescale = b.take(own);
  first.finish(b, rescale, dots);
  Stream s = open_stream();
  take_all_units<1, K, WARPS>(s, ring_of_lane(), b, rescale, first.UNITS, units, 0, dots);
}
template <int K, int WARPS, class First>
DEVICE_ONCE void dot_units_held(const uint32_t* words, uint32_t tag, int units, float* dots) {
  First first;
  first.take();
  dot_held<K, WARPS>(first, words, tag, units, dots);
}

// Of a vector on its way that is to be normed (``take_normed``).
template <int ARITY, int K, int WARPS, class First>
DEVICE float dot_normed(const First& first, const uint32_t* words, uint32_t tag, const float* scale, float offset, float* to, float* squares, int units, float* dots) {
  const float rescale = take_normed<K, WARPS>(words, tag, scale, offset, to, squares);
  const typename Share<ARITY, K, WARPS>::B b(to, threadIdx.x / 32 % WARPS, WARPS);
  first.finish(b, rescale, dots);
  Stream s = open_stream();
  take_all_units<ARITY, K, WARPS>(s, ring_of_lane(), b, rescale, first.UNITS, units, 0, dots);
  return rescale;
}
template <int ARITY, int K, int WARPS, class First>
DEVICE_ONCE float dot_units_normed(const uint32_t* words, uint32_t tag, const float* scale, float offset, float* to, float* squares, int units, float* dots) {
  First first;
  first.take();
  return dot_normed<ARITY, K, WARPS>(first, words, tag, scale, offset, to, squares, units, dots);
}

// Units of which the warps have their shares of the dots, until they meet: how many, and how many tiles.
struct Batch { int units, tiles; };

// The row of the batch that a thread finishes: of which part (−1: none) and unit, and where its dots are.
struct Mine { int part, unit, turn, tile; };

// Take ``count`` units of part ``part`` into the batch, the first one unit number ``first``; with their dots still to be taken.
DEVICE void plan_units(Batch& batch, Mine& mine, int part, int arity, int first, int count) {
  const int unit = threadIdx.x / TILE_ROWS - batch.units;
  if (unit >= 0 && unit < count) mine = {part, first + unit, batch.units + unit, batch.tiles + unit * arity};
  batch.units += count, batch.tiles += arity * count;
}

// The same, and take their dots.
template <int ARITY, int K, int WARPS, bool NORMED>
DEVICE void begin_units(Worker& w, const Activation<K, WARPS, NORMED>& a, Batch& batch, Mine& mine, int part, int first, int count) {
  float* dots = shared_state().dots[w.meetings & 1][w.thread / 32] + batch.tiles * TILE_ROWS;
  dot_units<ARITY, K, WARPS>(a.x, a.rescale, count, batch.units, dots);
  plan_units(batch, mine, part, ARITY, first, count);
}

// Take in a vector that others write and take the dots of the batch's units with it at once, the first of which a warp has the
// weights of in hand by then: from here on, or those taken ``ahead``, in an earlier stage.
template <int K, int WARPS, class First>
DEVICE Activation<K, WARPS, false> take_in_and_dot(Worker& w, Row source, const Batch& batch) {
  dot_units_held<K, WARPS, First>(source.words, source.tag, batch.units, shared_state().dots[w.meetings & 1][w.thread / 32]);
  return {};
}
template <int K, int WARPS, class First>
DEVICE Activation<K, WARPS, false> take_in_and_dot(Worker& w, const First& ahead, Row source, const Batch& batch) {
  dot_held<K, WARPS>(ahead, source.words, source.tag, batch.units, shared_state().dots[w.meetings & 1][w.thread / 32]);
  return {};
}

// The same of a vector that is to be normed.
template <int ARITY, int K, int WARPS, class First>
DEVICE Activation<K, WARPS, true> take_in_normed_and_dot(Worker& w, Row source, const float* scale, float offset, float eps, float* packed, const Batch& batch) {
  const int half = w.meetings & 1, warp = w.thread / 32;
  float *to = of_team<K, WARPS>(packed), *squares = shared_state().squares[half];
  const float rescale = dot_units_normed<ARITY, K, WARPS, First>(source.words, source.tag, scale, offset, to, squares + warp, batch.units, shared_state().dots[half][warp]);
  return {to, rescale, squares + warp / WARPS * WARPS, eps};
}
template <int ARITY, int K, int WARPS, class First>
DEVICE Activation<K, WARPS, true> take_in_normed_and_dot(Worker& w, const First& ahead, Row source, const float* scale, float offset, float eps, float* packed, const Batch& batch) {
  const int half = w.meetings & 1, warp = w.thread / 32;
  float *to = of_team<K, WARPS>(packed), *squares = shared_state().squares[half];
  const float rescale = dot_normed<ARITY, K, WARPS>(ahead, source.words, source.tag, scale, offset, to, squares + warp, batch.units, shared_state().dots[half][warp]);
  return {to, rescale, squares + warp / WARPS * WARPS, eps};
}

// The warps meet: all dots of the batch are there, in all threads. False when the worker must leave.
DEVICE bool meet(Worker& w) {
  const int meetings = w.meetings;
  asm volatile("cp.async.wait_all;" ::: "memory");  // rows of position tables
  const bool here = !any_consumer(leave_now());
  w.meetings = meetings + 1;
  return here;
}

// The dots of the thread's own row, handed to ``finish(unit, dot)``.
template <int ARITY, int T, int K, int WARPS, bool NORMED, class Finish>
DEVICE void end_unit(Worker& w, Activation<K, WARPS, NORMED>& a, const Mine& mine, Finish finish) {
  const auto& dots = shared_state().dots[~w.meetings & 1];
  const int team = mine.turn % (CONSUMER_WARPS / WARPS) * WARPS;
  const float factor = a.factor();
  vec dot[ARITY][T];
  UNROLL for (int t = 0; t < ARITY; ++t) {
    const int row = (mine.tile + t) * TILE_ROWS + w.thread % TILE_ROWS;
    dot[t][0] = dots[team][row];
    UNROLL for (int warp = 1; warp < WARPS; ++warp) dot[t][0] += dots[team + warp][row];
    dot[t][0] *= factor;
  }
  finish(mine.unit, dot);
}

// All units of a part, batch by batch. False when the worker must leave.
template <int ARITY, int T, int K, int WARPS, bool NORMED, class Finish>
DEVICE bool for_units(Worker& w, Activation<K, WARPS, NORMED>& a, int first, int count, Finish finish) {
  ROLLED for (int done = 0; done < count; done += BATCH_UNITS) {
    const int units = count - done < BATCH_UNITS ? count - done : BATCH_UNITS;
    Batch batch = {};
    Mine mine = {-1};
    begin_units<ARITY>(w, a, batch, mine, 0, first + done, units);
    if (!meet(w)) return false;
    a.factor();  // in all threads, as long as the squares are there
    if (mine.part == 0) end_unit<ARITY, T>(w, a, mine, finish);
  }
  return true;
}

// Pass over units whose dots nobody needs.
template <int ARITY, int K, int WARPS, bool NORMED>
DEVICE void skip_units(const Worker&, const Activation<K, WARPS, NORMED>&, int count) {
  Stream s = open_stream();
  pass_over(s, count * UNIT_BYTES<ARITY, K>);
  close_stream(s);
}
