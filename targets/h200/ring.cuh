// The stream: chunks of CHUNK_BYTES of weights, and of cached keys and values, go round a ring of SLOTS slots in shared memory. The
// producer never waits for activations, only for room, for its window, and once a step for the caches' last rows. Who has
// come how far is told in bytes from the stream's begin, modulo 2³²: a relaying lane says what has landed, each consumer
// warp what it needs no more. A word of shared memory is read much faster than a barrier.

// A window that fits into the ring, in bytes.
DEVICE_MEMBER constexpr uint32_t at_most(int window) { return (window < SLOTS ? window : SLOTS - 1) * CHUNK_BYTES; }

DEVICE uint32_t around(uint32_t place) { return place < RING_BYTES ? place : place - RING_BYTES; }

// This warp's place in the stream.
DEVICE Stream open_stream() { return shared_state().streams[threadIdx.x / 32]; }

// Wait until byte ``at`` of the unit under way has landed. Caches come only once all workers have completed the step before, so
// that this wait, too, may be in vain.
DEVICE void land(Stream& s, int at) {
  if (s.landed > at) return;
  ROLLED do s.landed = (int)(load_acquire(&shared_state().landed) - s.begin);
  while (s.landed <= at && !leave_now());
}

// Give back what lies before byte ``at``: this warp has read what it needs of it. A warp's reads of shared memory and its store
// are done in their order, so that no fence, which would wait for everything else, too, is needed.
DEVICE void release(const Stream& s, int at) {
  __syncwarp();
  asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(shared_address(&shared_state().released[threadIdx.x / 32])), "r"(s.begin + at) : "memory");
}

// The unit of ``bytes`` bytes is done; the next begins behind it.
DEVICE void next_unit(Stream& s, int bytes) {
  s.unit += bytes;
  UNROLL for (uint32_t rounds = 0; rounds <= (uint32_t)bytes / RING_BYTES; ++rounds) s.unit = around(s.unit);
  s.begin += bytes;
  s.landed -= bytes;
}

// Units of ``bytes`` bytes that are not this warp's, maybe more than the ring holds.
DEVICE void pass_over(Stream& s, int bytes) {
  s.unit += (uint32_t)bytes % RING_BYTES;
  s.unit = around(s.unit);
  s.begin += bytes;
  s.landed -= bytes;
  release(s, 0);
}

// Everything before the unit under way is given back, and what this warp knows is kept for the next that opens the stream.
DEVICE void close_stream(const Stream& s) {
  release(s, 0);
  shared_state().streams[threadIdx.x / 32] = s;
  __syncwarp();
}

// Go on at the next chunk: what comes begins with one of its own.
DEVICE void next_chunk(Stream& s) {
  const int left = -s.begin % CHUNK_BYTES;
  s.unit = around(s.unit + left);
  s.begin += left;
  s.landed -= left;
}

// A step begins: the stream does so again, and this worker says that what it appended to the caches in earlier steps is
// there, for the bulk copies of others, too. All its threads have met since.
DEVICE void rewind_stream(Worker& w) {
  Stream s = open_stream();
  next_chunk(s);
  close_stream(s);
  if (w.thread != 0) return;
  asm volatile("fence.proxy.async;" ::: "memory");
  __threadfence();
  store_word(&report_of(*w.launch, w.id).steps, (uint32_t)(int)w.step);
}

// The cached positions of an attention span: the step's own position is not among them.
DEVICE int cached_positions(AttentionSpan span, int position) {
  const int end = span.last < position ? span.last : position;
  return end > span.first ? end - span.first : 0;
}

// Positions in a chunk of a cache: their keys in the first half, their values in the second. They are taken sixteen at a time.
DEVICE_MEMBER constexpr int chunk_positions(int row_bytes) {
  const int fit = CHUNK_BYTES / 2 / row_bytes;
  return fit < 16 ? fit : fit / 16 * 16;
}

// ── producers: lanes of their own, which take turns with the chunks ──

// ``sent``: bytes of the stream before the next chunk; ``free``: how far the ring has room, as last seen.
struct Producer { uint32_t turn, chunk, slot, sent, free; };

DEVICE bool stopped() { return *(volatile int32_t*)&shared_state().stop; }

DEVICE uint32_t full_barrier(uint32_t slot) { return shared_address(&shared_state().full[slot]); }

// The least of two places in the stream.
DEVICE uint32_t nearer(uint32_t a, uint32_t b) { return (int32_t)(a - b) < 0 ? a : b; }

// How far the ring has room: what was there before has landed, and all warps have given it back.
DEVICE uint32_t free_until(uint32_t landed) {
  uint32_t least = landed;
  UNROLL for (int warp = 0; warp < CONSUMER_WARPS; ++warp) least = nearer(least, load_acquire(&shared_state().released[warp]));
  return least + RING_BYTES;
}

// Wait for room for the next chunk, in the window and in the ring. False when the worker stops.
DEVICE bool make_room(Producer& p) {
  const Shared& shared = shared_state();
  while (true) {
    const uint32_t landed = load_acquire(&shared.landed), window = *(volatile uint32_t*)&shared.window;
    if (stopped()) return false;
    if ((int32_t)(landed + window - p.sent) < CHUNK_BYTES) continue;
    if ((int32_t)(p.free - p.sent) >= CHUNK_BYTES) return true;
    p.free = free_until(landed);
  }
}

// Whether the next chunk is this lane's.
DEVICE bool my_turn(const Producer& p) { return p.chunk % PRODUCERS == p.turn; }

DEVICE uint32_t room(const Producer& p) { return shared_address(shared_memory + RING_BEGIN) + p.slot * CHUNK_BYTES; }

DEVICE void sent(Producer& p) {
  p.sent += CHUNK_BYTES, ++p.chunk;
  if (++p.slot == SLOTS) p.slot = 0;
}

// Bytes ``at`` to ``end`` of the weights. False when the worker stops.
DEVICE bool send_weights(Producer& p, const uint8_t* stream, int64_t at, int64_t end) {
  for (; at < end; at += CHUNK_BYTES, sent(p)) {
    if (!my_turn(p)) continue;
    if (!make_room(p)) return false;
    const int bytes = end - at < CHUNK_BYTES ? (int)(end - at) : CHUNK_BYTES;
    barrier_expect(full_barrier(p.slot), bytes);
    copy_bulk(room(p), stream + at, bytes, full_barrier(p.slot));
  }
  return true;
}

// ``count`` rows of a head's keys and values, which lie one after the other. False when the worker stops.
DEVICE bool send_cache(Producer& p, const uint8_t* keys, const uint8_t* values, int row_bytes, int count) {
  const int most = chunk_positions(row_bytes);
  for (int done = 0; done < count; done += most, sent(p)) {
    if (!my_turn(p)) continue;
    if (!make_room(p)) return false;
    const int bytes = (count - done < most ? count - done : most) * row_bytes;
    barrier_expect(full_barrier(p.slot), 2 * bytes);
    copy_bulk(room(p), keys + (int64_t)done * row_bytes, bytes, full_barrier(p.slot));
    copy_bulk(room(p) + most * row_bytes, values + (int64_t)done * row_bytes, bytes, full_barrier(p.slot));
  }
  return true;
}

// One step's weights, and between them the caches of the attention units this worker does. False when the worker stops.
DEVICE bool send_step(Producer& p, const kogc_launch& launch, const uint8_t* stream, int64_t length, Cursor feed, int step) {
  const int position = launch.start_position + step;
  int64_t at = 0;
  for (int units = feed.next(); units > 0; --units) {
    const int64_t before = feed.next_wide(), keys = feed.next_wide(), values = feed.next_wide();
    const int split = feed.next(), splits = feed.next(), window = feed.next(), row_bytes = feed.next();
    if (!send_weights(p, stream, at, before)) return false;
    at = before;
    const AttentionSpan span = split_span(position, position + 1, split, splits, window);
    const int count = cached_positions(span, position);
    if (count == 0) continue;
    while (*(volatile int32_t*)&shared_state().steps < step)  // the caches' last rows are from the step before
      if (stopped()) return false;
    asm volatile("fence.proxy.async;" ::: "memory");
    const uint8_t* kv = launch.kv + (int64_t)span.first * row_bytes;
    if (!send_cache(p, kv + keys, kv + values, row_bytes, count)) return false;
  }
  return send_weights(p, stream, at, length);
}

// Send step after step until the worker stops; then see the lane's last copies land, for a block must not end before them. After
// the stop no lane begins more than one copy.
DEVICE void produce(const kogc_launch& launch, const uint8_t* stream, int64_t length, Cursor feed, uint32_t turn) {
  Producer p = {turn};
  for (int step = 0; !stopped() && send_step(p, launch, stream, length, feed, step); ++step) {}
  const uint32_t landed = load_acquire(&shared_state().landed), end = p.sent;
  for (p.sent -= nearer(SLOTS, p.chunk) * CHUNK_BYTES, p.chunk -= nearer(SLOTS, p.chunk); p.sent != end; p.sent += CHUNK_BYTES, ++p.chunk)
    if (my_turn(p) && (int32_t)(p.sent - landed) >= 0)
      while (!barrier_passed(full_barrier(p.chunk % SLOTS), p.chunk / SLOTS & 1)) {}
}

// ── the relay: another lane ──

// Tell what has landed, chunk by chunk, until the worker stops.
DEVICE void relay() {
  Shared& shared = shared_state();
  uint32_t slot = 0, phase = 0, landed = 0;
  while (!stopped()) {
    if (!barrier_passed(full_barrier(slot), phase)) continue;
    store_release(&shared.landed, landed += CHUNK_BYTES);
    if (++slot == SLOTS) slot = 0, phase ^= 1;
  }
}
