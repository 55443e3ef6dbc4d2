// The stream: chunks of CHUNK_BYTES of weights, and of cached keys and values, go round a ring of SLOTS slots in shared memory.
// The producer never waits for activations, only for room, for its window, and once a step for the caches' last rows;
// consumers wait for what they read and give back what they have read.

DEVICE uint32_t full_barrier(uint32_t slot) { return shared_address(&shared_state().full[slot]); }
DEVICE uint32_t empty_barrier(uint32_t slot) { return shared_address(&shared_state().empty[slot]); }

// A window that fits into the ring.
DEVICE_MEMBER constexpr int at_most(int window) { return window < SLOTS ? window : SLOTS - 1; }

DEVICE uint32_t around(uint32_t place) { return place < RING_BYTES ? place : place - RING_BYTES; }

// This warp's place in the stream. All addresses it needs are in it: made anew at each use they would be slow.
DEVICE Stream open_stream() { return shared_state().streams[threadIdx.x / 32]; }

DEVICE bool leave_now(const Stream& s) {
  uint32_t leave;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(leave) : "r"(s.barriers + (uint32_t)(size_t)&((Shared*)0)->leave));
  return leave;
}

// Wait until byte ``at`` of the unit under way has landed. Caches come only once all workers have completed the step before, so
// that this wait, too, may be in vain.
DEVICE void land(Stream& s, int at) {
  ROLLED while (s.landed <= at) {
    ROLLED while (!barrier_passed(s.landing, s.phase) && !leave_now(s)) {}
    s.landed += CHUNK_BYTES;
    s.landing += 8;
    if (s.landing == s.barriers + 8 * SLOTS) s.landing = s.barriers, s.phase ^= 1;
  }
}

// Give back what lies before byte ``at``, all of which has landed: this warp has read what it needs of it.
DEVICE void release(Stream& s, int at) {
  if (sizeof(storage) == 4) __syncwarp();  // else all lanes have met in a matrix instruction since they read it
  ROLLED while (s.released + CHUNK_BYTES <= at) {
    if (threadIdx.x % 32 == 0) barrier_arrive(s.releasing + sizeof(Shared::full));
    s.released += CHUNK_BYTES;
    s.releasing += 8;
    if (s.releasing == s.barriers + 8 * SLOTS) s.releasing = s.barriers;
  }
}

// The unit of ``bytes`` bytes is done; the next begins behind it.
DEVICE void next_unit(Stream& s, int bytes) {
  s.unit += bytes;
  UNROLL for (uint32_t rounds = 0; rounds <= (uint32_t)bytes / RING_BYTES; ++rounds) s.unit = around(s.unit);
  s.landed -= bytes;
  s.released -= bytes;
}

// Pass over everything before the unit under way, chunk by chunk: it may be more than the ring holds.
DEVICE void catch_up(Stream& s) {
  ROLLED while (s.released + CHUNK_BYTES <= 0) {
    land(s, s.released + CHUNK_BYTES - 1);
    release(s, s.released + CHUNK_BYTES);
  }
  land(s, -1);
}

DEVICE void close_stream(Stream& s) {
  catch_up(s);
  __syncwarp();
  if (threadIdx.x % 32 == 0) shared_state().streams[threadIdx.x / 32] = s;
  __syncwarp();
}

// Go on at the next chunk: what comes begins with one of its own.
DEVICE void next_chunk(Stream& s) {
  catch_up(s);
  const int left = -s.released % CHUNK_BYTES ? CHUNK_BYTES + s.released % CHUNK_BYTES : 0;
  s.unit = around(s.unit + left);
  s.landed -= left;
  s.released -= left;
  catch_up(s);
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

// ── the producer: one lane ──

struct Producer {
  uint32_t slot, phase, oldest, oldest_phase;
  int under_way;
};

DEVICE bool stopped() { return *(volatile int32_t*)&shared_state().stop; }

DEVICE void land_oldest(Producer& p) {
  barrier_wait(full_barrier(p.oldest), p.oldest_phase);
  if (++p.oldest == SLOTS) p.oldest = 0, p.oldest_phase ^= 1;
  --p.under_way;
}

// Wait for room in the window and in the ring. False when the worker stops.
DEVICE bool make_room(Producer& p) {
  while (p.under_way >= *(volatile int32_t*)&shared_state().window) land_oldest(p);
  while (!barrier_passed(empty_barrier(p.slot), p.phase ^ 1))  // a fresh barrier has passed its round before the first
    if (stopped()) return false;
  return !stopped();
}

DEVICE uint32_t room(const Producer& p) { return shared_address(shared_memory + RING_BEGIN) + p.slot * CHUNK_BYTES; }

DEVICE void sent(Producer& p) {
  ++p.under_way;
  if (++p.slot == SLOTS) p.slot = 0, p.phase ^= 1;
}

// Bytes ``at`` to ``end`` of the weights. False when the worker stops.
DEVICE bool send_weights(Producer& p, const uint8_t* stream, int64_t at, int64_t end) {
  for (; at < end; at += CHUNK_BYTES) {
    if (!make_room(p)) return false;
    const int bytes = end - at < CHUNK_BYTES ? (int)(end - at) : CHUNK_BYTES;
    barrier_expect(full_barrier(p.slot), bytes);
    copy_bulk(room(p), stream + at, bytes, full_barrier(p.slot));
    sent(p);
  }
  return true;
}

// ``count`` rows of a head's keys and values, which lie one after the other. False when the worker stops.
DEVICE bool send_cache(Producer& p, const uint8_t* keys, const uint8_t* values, int row_bytes, int count) {
  const int most = chunk_positions(row_bytes);
  for (int done = 0; done < count; done += most) {
    if (!make_room(p)) return false;
    const int bytes = (count - done < most ? count - done : most) * row_bytes;
    barrier_expect(full_barrier(p.slot), 2 * bytes);
    copy_bulk(room(p), keys + (int64_t)done * row_bytes, bytes, full_barrier(p.slot));
    copy_bulk(room(p) + most * row_bytes, values + (int64_t)done * row_bytes, bytes, full_barrier(p.slot));
    sent(p);
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

// Send step after step until the worker stops; then see the last copies land, for a block must not end before them.
DEVICE void produce(const kogc_launch& launch, const uint8_t* stream, int64_t length, Cursor feed) {
  Producer p = {};
  for (int step = 0; !stopped() && send_step(p, launch, stream, length, feed, step); ++step) {}
  while (p.under_way > 0) land_oldest(p);
}
