// The largest logit a worker has seen and its vocabulary index; index −1: one of the logits was NaN.
struct Best { float logit; int32_t index; };

// The larger logit, of equals the first; a NaN sticks.
DEVICE Best better(Best a, Best b) {
  if (a.index < 0 || b.index < 0) return {NOTHING, -1};
  return b.logit > a.logit || (b.logit == a.logit && b.index < a.index) ? b : a;
}

// Registers are given to groups of four warps: the producer's group leaves most of its share to the consumers.
constexpr int CONSUMERS = CONSUMER_WARPS * 32, THREADS = CONSUMERS + 128;

// Where in the program a worker is: stage number in source order, iteration of its segment. For reports and faults only.
struct Place { int stage, iteration; };

// How far a warp is in the worker's stream, kept in shared memory between uses. Bytes count from the unit under way; slots are
// the ring's.
struct Stream {
  uint32_t unit;            // where in the ring the unit begins
  int landed, released;     // ends of the newest chunk seen to have landed and of the oldest not given back
  uint32_t landing, phase;  // slot of the next chunk to land, and the parity of its round
  uint32_t releasing;       // slot of the oldest chunk not given back
  uint32_t barriers;        // address of the ring's full barriers; the empty ones follow
};

// A thread's view of its worker. What concerns the worker is the same in all consumer threads.
struct Worker {
  const kogc_launch* launch;
  const int32_t* plan;
  float* scratch;  // near memory of this worker: shared
  int id, thread;
  int64_t step;
  int columns;
  bool wants_logits;
  int32_t token[MAX_COLUMNS], position[MAX_COLUMNS];
  Best best[MAX_COLUMNS];  // of the rows this thread finished
  int32_t sampled, nan_position;
  int32_t entered;
  int meetings;  // sums and batches of dots so far: neighbours use different memory
};

// Shared memory that has a name; behind it lie near memory, the worker's script and the ring.
struct Shared {
  uint64_t full[64], empty[64];  // per slot of the ring
  float sums[2][CONSUMER_WARPS];
  Best best[CONSUMER_WARPS];
  Stream streams[CONSUMER_WARPS];
  int32_t stop, steps;  // the producer shall stop; how many steps all workers have completed
  int32_t leave;        // the worker shall
  uint64_t nothing;     // zeros
  Place place;          // the stage under way, the step's number and how many stages have been entered
  int32_t step, entered;
  float dots[2][CONSUMER_WARPS][BATCH_UNITS * 2 * TILE_ROWS * MAX_COLUMNS];
};
extern __shared__ __align__(1024) uint8_t shared_memory[];
DEVICE Shared& shared_state() { return *(Shared*)shared_memory; }
constexpr int NEAR_BEGIN = (sizeof(Shared) + 127) / 128 * 128;
constexpr int SCRIPT_BEGIN = NEAR_BEGIN + SCRATCH_FLOATS * 4;
constexpr int RING_BEGIN = (SCRIPT_BEGIN + SCRIPT_WORDS * 4 + 127) / 128 * 128;
constexpr int SLOTS = (SHARED_BYTES - RING_BEGIN) / CHUNK_BYTES < 64 ? (SHARED_BYTES - RING_BEGIN) / CHUNK_BYTES : 64;
constexpr uint32_t RING_BYTES = SLOTS * CHUNK_BYTES;
static_assert(SLOTS > WINDOW, "near memory leaves too little for the ring");

// What of a worker's values does not fit into near memory lies in global memory.
DEVICE float* far_memory(const Worker& w) { return (float*)(w.launch->exchange + FAR_BEGIN) + w.id * FAR_FLOATS; }

// Words of launch.control.
enum { LEAVE = 0, ARRIVED = 1, LEFT = 2, REASON = 3, ABORTED = 4 };

// What all others may know of a worker: how many steps it has completed, and what it waited for in vain. The worker that
// leaves last passes on to the host the report of the wait that comes first in the program; the others are its consequences.
struct Report {
  int64_t entered, expected, seen;
  int32_t stage, iteration, worker, step;
  int32_t filled;
  uint32_t steps;
};
static_assert(sizeof(Report) <= 64, "a report has 64 bytes");
DEVICE Report& report_of(const kogc_launch& launch, int worker) { return *(Report*)(launch.exchange + REPORTS_BEGIN + 64 * worker); }

// ── threads of a worker together ──

DEVICE void worker_sync(const Worker&) { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// Whether ``mine`` holds for any consumer thread; a meeting of all of them.
DEVICE bool any_consumer(bool mine) {
  uint32_t found;
  asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, 1, %2, p; selp.u32 %0, 1, 0, q; }"
               : "=r"(found) : "r"((uint32_t)mine), "n"(CONSUMERS) : "memory");
  return found;
}

DEVICE int walk_begin(const Worker& w) { return w.thread; }
DEVICE int walk_step(const Worker&) { return CONSUMERS; }

DEVICE float warp_sum(float x) {
  UNROLL for (int lanes = 16; lanes; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
  return x;
}

// The sum over all consumer threads, in a fixed order.
DEVICE float worker_sum(const Worker& w, float x) {
  float* sums = shared_state().sums[const_cast<Worker&>(w).meetings++ & 1];
  x = warp_sum(x);
  if (w.thread % 32 == 0) sums[w.thread / 32] = x;
  worker_sync(w);
  float total = sums[0];
  UNROLL for (int warp = 1; warp < CONSUMER_WARPS; ++warp) total += sums[warp];
  return total;
}

// ── leaving ──

DEVICE bool asked_to_leave(const Worker& w) { return load_word(w.launch->control + LEAVE) != 0; }

// The host cancelled, or a worker gave up; all threads of a worker see the same.
DEVICE bool leaving(const Worker& w) { return any_consumer(asked_to_leave(w)); }

// Asked in every round of a wait: whether the watching warp has seen that it is in vain.
DEVICE bool leave_now() { return *(volatile int32_t*)&shared_state().leave; }

// Fault injection (builds with KOGC_FAULT only): which fault hits this worker here, 0 for none.
DEVICE int fault_at(const Worker& w, Place place) {
#ifdef KOGC_FAULT
  const kogc_launch& l = *w.launch;
  return l.fault_stage == place.stage && l.fault_worker == w.id ? l.fault : 0;
#else
  return 0;
#endif
}

// When a stage begins (0), when all it waits for is there (1): profile builds (KOGC_PROFILE) keep the clock of the last step.
DEVICE void stamp(const Worker& w, int what) {
#ifdef KOGC_PROFILE
  const int instance = (w.entered - 1) % INSTANCES;
  if (w.thread == 0) ((int64_t*)w.launch->probe)[(w.id * INSTANCES + instance) * 2 + what] = clock64();
#endif
}

// Begin a stage. False when the worker must leave.
DEVICE bool enter(Worker& w, Place place) {
  ++w.entered;
  if (w.thread == 0) {
    Shared& shared = shared_state();
    shared.place = place, shared.step = (int32_t)w.step, *(volatile int32_t*)&shared.entered = w.entered;
  }
  stamp(w, 0);
  while (fault_at(w, place) == FAULT_STUCK)
    if (leaving(w)) return false;
  return true;
}
