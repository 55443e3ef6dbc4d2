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

// How far a warp is in the worker's stream, kept in shared memory between uses.
struct Stream {
  uint32_t unit;   // where in the ring the unit under way begins
  uint32_t begin;  // and where in the stream, in bytes modulo 2³²
  int landed;      // bytes of the stream that were seen to have landed, from there on
};

// Shared memory that has a name; behind it lie near memory, the worker's script and the ring.
constexpr int KEPT = 16;
struct Shared {
  uint64_t full[64];  // per slot of the ring
  uint32_t landed;    // bytes of the stream that have landed,
  __align__(16) uint32_t released[CONSUMER_WARPS];  // and that each warp needs no more
  kogc_launch launch;
  int32_t kept[CONSUMER_WARPS][KEPT];  // what a warp knows of its worker
  Best bests[CONSUMERS];               // of the rows each thread finished
  float sums[2][CONSUMER_WARPS], squares[2][CONSUMER_WARPS];
  Best best[CONSUMER_WARPS];
  Stream streams[CONSUMER_WARPS];
  int32_t stop, steps;  // the producer shall stop; how many steps all workers have completed
  int32_t leave;        // the worker shall
  uint32_t window;      // bytes that the producer may have under way
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
static_assert((CHUNK_BYTES & CHUNK_BYTES - 1) == 0, "places in the stream are counted modulo 2³²: whole chunks must fit");
static_assert(SLOTS > 4, "the vectors of this model leave too little shared memory for the ring of weights");  // what a warp takes at once lies in up to three chunks

// An int that all threads of a worker know, the same in each: kept once a warp. In registers it would be in everybody's way.
template <int N>
struct Kept {
  DEVICE_MEMBER operator int() const { return shared_state().kept[threadIdx.x / 32][N]; }
  DEVICE_MEMBER void operator=(int value) {
    __syncwarp();  // all lanes have read it
    shared_state().kept[threadIdx.x / 32][N] = value;
  }
  DEVICE_MEMBER void operator++() { *this = *this + 1; }
};

// A thread's view of its worker. All it knows lies in shared memory or follows from the thread's number.
struct Worker {
  struct { DEVICE_MEMBER const kogc_launch* operator->() const { return &shared_state().launch; }
           DEVICE_MEMBER const kogc_launch& operator*() const { return shared_state().launch; } } launch;
  struct { DEVICE_MEMBER const int32_t* operator+(int words) const { return (const int32_t*)(shared_memory + SCRIPT_BEGIN) + words; }
           DEVICE_MEMBER int32_t operator[](int word) const { return *(*this + word); } } plan;
  struct { DEVICE_MEMBER float* operator+(int floats) const { return (float*)(shared_memory + NEAR_BEGIN) + floats; } } scratch;  // near memory
  struct { DEVICE_MEMBER operator int() const { return blockIdx.x; } } id;
  struct { DEVICE_MEMBER operator int() const { return threadIdx.x; } } thread;
  struct { DEVICE_MEMBER Best& operator[](int) const { return shared_state().bests[threadIdx.x]; } } best;
  Kept<0> step;
  Kept<1> columns;
  Kept<2> wants_logits;
  Kept<3> sampled;
  Kept<4> nan_position;
  Kept<5> meetings;  // sums and batches of dots so far: neighbours use different memory
  Kept<6> turn;      // the warp that polls the stage's next operand
  Kept<9> fed;       // tokens of the prompt
  Kept<10> produced;  // tokens generated
  struct { DEVICE_MEMBER Kept<7> operator[](int) const { return {}; } } token;
  struct { DEVICE_MEMBER Kept<8> operator[](int) const { return {}; } } position;
};

// What of a worker's values does not fit into near memory lies in global memory.
DEVICE float* far_memory(const Worker& w) { return (float*)(w.launch->exchange + FAR_BEGIN) + blockIdx.x * FAR_FLOATS; }

// Words of launch.control.
enum { LEAVE = 0, ARRIVED = 1, LEFT = 2, REASON = 3, ABORTED = 4 };

// What all others may know of a worker: how many steps it has completed, and what it waited for in vain. The worker that
// leaves last passes on to the host the report of the wait that comes first in the program; the others are its consequences.
struct Report {
  int64_t entered;
  int32_t stage, iteration, worker, step;
  int32_t filled;
  uint32_t steps;
};
static_assert(sizeof(Report) <= 64, "a report has 64 bytes");
DEVICE Report& report_of(const kogc_launch& launch, int worker) { return *(Report*)(launch.exchange + REPORTS_BEGIN + 64 * worker); }

// ── threads of a worker together ──

DEVICE void worker_sync() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }
DEVICE void worker_sync(const Worker&) { worker_sync(); }

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
  const int meetings = w.meetings;
  float* sums = shared_state().sums[meetings & 1];
  x = warp_sum(x);
  if (w.thread % 32 == 0) sums[w.thread / 32] = x;
  worker_sync(w);
  const_cast<Worker&>(w).meetings = meetings + 1;
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
DEVICE void stamp(int what) {
#ifdef KOGC_PROFILE
  if (threadIdx.x != 0) return;
  const Shared& shared = shared_state();
  const int instance = (shared.entered - 1) % INSTANCES;
  ((int64_t*)shared.launch.probe)[(blockIdx.x * INSTANCES + instance) * 2 + what] = clock64();
#endif
}

// Begin a stage. False when the worker must leave.
DEVICE bool enter(Worker& w, Place place) {
  if (w.thread == 0) {
    Shared& shared = shared_state();
    shared.place = place, shared.step = w.step, *(volatile int32_t*)&shared.entered = shared.entered + 1;
  }
  w.turn = 0;
  stamp(0);
  while (fault_at(w, place) == FAULT_STUCK)
    if (leaving(w)) return false;
  return true;
}
