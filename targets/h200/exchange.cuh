// Exchange between workers: the data is the flag. The two lowest bits of every exchanged word are a tag that changes with each
// write of its slot; a reader polls the very words it needs until all of them carry the tag it expects. No fences, no
// counters: a word is either there or not. What a reader sees goes into its own shared memory.
//
// Write k of step s of a buffer has index s · writes + k and lies in slot index mod slots; it is the (index div slots)-th
// write of that slot and carries that number plus one, mod four. The host zeroes all words before a launch, so that the
// first writes are told from nothing. A slot is written again only by a worker that has received something which every
// reader could publish only after reading the slot (the plan is checked for it), so that nobody can miss a write. Four
// tags tell a late word of the write before from the one awaited, and even of the two before that.
struct Buffer { int64_t data, flags; int lanes, pitch, slots, writes; };  // data: bytes from the exchange's begin

// A value in this worker's own memory: vector ``lane`` of column t.
struct View {
  float* values;
  int lanes, pitch;
  DEVICE_MEMBER float* at(int t, int lane) const { return values + (t * lanes + lane) * pitch; }
};

// Rows of a write under way.
struct Row {
  uint32_t* words;
  uint32_t tag;
  DEVICE_MEMBER Row operator+(int rows) const { return {words + rows, tag}; }
  DEVICE_MEMBER void put(int row, float value) const { store_word(words + row, __float_as_uint(value) & ~3u | tag); }
};
struct Outgoing {
  uint32_t *words, tag;
  int lanes, pitch;
  DEVICE_MEMBER Row at(int t, int lane) const { return {words + (t * lanes + lane) * pitch, tag}; }
};

// One write of a buffer: where its words are and the tag they carry.
DEVICE Outgoing write_of(const Worker& w, Buffer buffer, int write) {
  const uint32_t index = (uint32_t)(int)w.step * buffer.writes + write, round = index / buffer.slots, slot = index % buffer.slots;
  uint32_t* words = (uint32_t*)(w.launch->exchange + buffer.data) + (int64_t)slot * MAX_COLUMNS * buffer.lanes * buffer.pitch;
  return {words, (round + 1) & 3, buffer.lanes, buffer.pitch};
}

DEVICE Outgoing outgoing(const Worker& w, Buffer buffer, int write, Place place) {
  Outgoing made = write_of(w, buffer, write);
  const int fault = fault_at(w, place);
  if (fault == FAULT_DROPPED_PUBLISH) made.tag = (made.tag + 3) & 3;  // as if nothing had been written
  if (fault == FAULT_WRONG_SLOT) made.tag = (made.tag + 2) & 3;
  return made;
}

// Words are out as soon as they are stored.
DEVICE void publish(const Worker&, const Buffer&, const Outgoing&, Place) {}

// Whether a word of [first, last) among the four from row ``row`` on does not carry ``tag`` yet.
DEVICE bool incomplete(uint4 v, uint32_t tag, int row, int first, int last) {
  uint32_t off = ((v.x ^ tag) & 3 ? 1u : 0) | ((v.y ^ tag) & 3 ? 2u : 0) | ((v.z ^ tag) & 3 ? 4u : 0) | ((v.w ^ tag) & 3 ? 8u : 0);
  if (row < first) off &= 15u << (first - row);
  if (row + 4 > last) off &= 15u >> (row + 4 - last);
  return off;
}

DEVICE float4 without_tags(uint4 v) {
  return {__uint_as_float(v.x & ~3u), __uint_as_float(v.y & ~3u), __uint_as_float(v.z & ~3u), __uint_as_float(v.w & ~3u)};
}

// Store those of four rows from ``row`` on that are in [first, last): the others may be another interval's.
DEVICE void keep(float* own, float4 v, int row, int first, int last) {
  if (row >= first && row + 4 <= last) {
    *(float4*)own = v;
    return;
  }
  const float values[4] = {v.x, v.y, v.z, v.w};
  UNROLL for (int i = 0; i < 4; ++i)
    if (row + i >= first && row + i < last) own[i] = values[i];
}

// Poll rows [first, last) from ``words`` into ``own``: every ``stride``-th vector of four rows, beginning with number ``begin``.
DEVICE void poll(const uint32_t* words, float* own, uint32_t tag, int first, int last, int begin, int stride) {
  constexpr int AT_ONCE = 4;
  const int row = first / 4 * 4 + 4 * begin;
  ROLLED for (int base = first / 4 * 4; base < last; base += 4 * AT_ONCE * stride) {
    uint32_t open = 0;
    UNROLL for (int i = 0; i < AT_ONCE; ++i) open |= base + row - first / 4 * 4 + 4 * i * stride < last ? 1u << i : 0;
    ROLLED while (__any_sync(~0u, open)) {  // lanes that left one by one would stay apart in all that follows
      uint4 found[AT_ONCE];
      const int at = base + row - first / 4 * 4;
      UNROLL for (int i = 0; i < AT_ONCE; ++i)
        if (open >> i & 1) found[i] = load_words(words + at + 4 * i * stride);
      UNROLL for (int i = 0; i < AT_ONCE; ++i)
        if ((open >> i & 1) && !incomplete(found[i], tag, at + 4 * i * stride, first, last)) {
          keep(own + at + 4 * i * stride, without_tags(found[i]), at + 4 * i * stride, first, last);
          open &= ~(1u << i);
        }
      if (leave_now()) return;
    }
  }
}

// Receive ``count`` intervals (lane, first row, last) of a write into ``own``. A single one is polled by all warps together, of
// several each warp takes some, beginning with warp ``turn``.
DEVICE_ONCE void receive(Outgoing source, float* own, int own_pitch, const int32_t* intervals, int count, int turn) {
  const int thread = (threadIdx.x + (CONSUMER_WARPS - turn) * 32) % CONSUMERS, warp = thread / 32;
  ROLLED for (int i = count == 1 ? 0 : warp; i < count; i += CONSUMER_WARPS) {
    const int lane = intervals[3 * i], first = intervals[3 * i + 1], last = intervals[3 * i + 2];
    poll(source.at(0, lane).words, own + lane * own_pitch, source.tag, first, last, count == 1 ? thread : thread % 32, count == 1 ? CONSUMERS : 32);
  }
}

// Receive what ``work`` lists next of write ``write`` of this step into ``space``; ``found`` is where it will lie once all of
// the stage's operands are ``received``.
DEVICE bool await(Worker& w, Buffer buffer, int write, View space, Cursor& work, Place, View& found) {
  const int lane = work.next(), row = work.next(), count = work.next();
  found = {space.values - lane * space.pitch - row, space.lanes, space.pitch};
  const int turn = w.turn;
  // The next operand is others' to poll at the same time, if there are any.
  w.turn = (turn + (count == 1 ? (work.at[2] - work.at[1] + 127) / 128 : count)) % CONSUMER_WARPS;
  receive(write_of(w, buffer, write), found.values, space.pitch, work.at, count, turn);
  work.at += 3 * count;
  return true;
}

// Fetch WIDTH constants of ``lane`` into ``space`` while the worker waits; they are there once the stage's operands are ``received``.
template <int WIDTH>
DEVICE const float* constants(const Worker& w, const float* stored, int lane, float* space) {
  constexpr int FLOATS = WIDTH % 4 ? 1 : 4;
  ROLLED for (int i = w.thread * FLOATS; i < WIDTH; i += CONSUMERS * FLOATS)
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(space + i)), "l"(stored + lane * WIDTH + i), "n"(4 * FLOATS) : "memory");
  return space - lane * WIDTH;
}

// Fetch the row of a position table for the step's position into ``space`` while the worker waits; it is there once its threads meet.
template <int WIDTH>
DEVICE const float* position_row(const Worker& w, const float* table, float* space) {
  return constants<WIDTH>(w, table + (int64_t)w.position[0] * WIDTH, 0, space);
}

// A stage's operands are here, in all threads. False when the worker must leave.
DEVICE bool received(Worker& w) {
  asm volatile("cp.async.wait_all;" ::: "memory");  // constants
  const bool here = !any_consumer(leave_now());
  stamp(1);
  return here;
}

constexpr int MOST_INDEX = 0x1fffffff;  // two bits of an index are the tag's, one its sign

// The best logit of a worker's threads, and then of the worker, goes out as two words: the logit and its index.
template <int T>
DEVICE void publish_best(Worker& w, const Buffer&, const Outgoing& made, Place) {
  Best best = w.best[0];
  ROLLED for (int lanes = 16; lanes; lanes /= 2) {
    const Best other = {__shfl_xor_sync(~0u, best.logit, lanes), __shfl_xor_sync(~0u, best.index, lanes)};
    best = better(best, other);
  }
  Best* bests = shared_state().best;
  if (w.thread % 32 == 0) bests[w.thread / 32] = best;
  worker_sync(w);
  if (w.thread != 0) return;
  ROLLED for (int warp = 0; warp < CONSUMER_WARPS; ++warp) best = better(best, bests[warp]);
  if (w.launch->mode == MODE_TEACHER_FORCED) __threadfence_system();  // logits are for the host
  const Row row = made.at(0, 0) + 2 * w.id;
  store_word(row.words, __float_as_uint(best.logit) & ~3u | row.tag);
  store_word(row.words + 1, (uint32_t)(best.index < MOST_INDEX ? best.index : MOST_INDEX) << 2 | row.tag);
}

// The largest logit over all workers: the first of equals; index −1 when one of them met a NaN.
DEVICE Best best_of(const Worker& w, View best, int t) {
  Best top = {NOTHING, INT32_MAX};
  ROLLED for (int worker = w.thread % 32; worker < WORKERS; worker += 32) {
    const float* words = best.at(t, worker);
    top = better(top, Best{words[0], (int32_t)(__float_as_uint(words[1])) >> 2});
  }
  ROLLED for (int lanes = 16; lanes; lanes /= 2) {
    const Best other = {__shfl_xor_sync(~0u, top.logit, lanes), __shfl_xor_sync(~0u, top.index, lanes)};
    top = better(top, other);
  }
  return top;
}
