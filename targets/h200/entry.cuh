// ── the kernel ──

// Nobody starts before everybody is there: a block that never becomes resident is found here, not in the middle of a token.
DEVICE bool check_in(const Worker& w) {
  bool here = true;
  if (w.thread == 0) {
    uint32_t* control = w.launch->control;
    atomicAdd(control + ARRIVED, 1u);
    const int64_t began = clock_ns();
    while (load_word(control + ARRIVED) < WORKERS) {
      if (!asked_to_leave(w) && clock_ns() - began <= w.launch->spin_limit_ns) continue;
      if (atomicExch(control + ABORTED, 2u) == 0) {
        w.launch->state->abort_stage = -1;
        w.launch->state->abort_worker = w.id;
        w.launch->state->abort_seen = load_word(control + ARRIVED);
        w.launch->state->abort_expected = WORKERS;
      }
      atomicExch(control + LEAVE, 1u);
      here = false;
      break;
    }
    if (here && w.id == 0) *(volatile int64_t*)&w.launch->state->start_ns = clock_ns();
  }
  return !any_consumer(!here);
}

// The report of the wait that comes first in the program, of those that did not end.
DEVICE void pass_on_report(const kogc_launch& launch) {
  kogc_state& state = *launch.state;
  int64_t first = -1;
  for (int worker = 0; worker < WORKERS; ++worker) {
    const volatile Report& r = report_of(launch, worker);
    if (!r.filled || (first >= 0 && r.entered >= first)) continue;
    first = r.entered;
    state.abort_stage = r.stage, state.abort_iteration = r.iteration, state.abort_worker = r.worker, state.abort_step = r.step;
    state.abort_peer = -1, state.abort_expected = -1;  // a warp waits for many words of many workers at once
  }
}

// The last worker to leave tells the host that all have left, and why.
DEVICE void check_out(const kogc_launch& launch, int id, int32_t reason) {
  uint32_t* control = launch.control;
  if (id == 0) atomicExch(control + REASON, (uint32_t)reason);
  __threadfence();
  if (atomicAdd(control + LEFT, 1u) != WORKERS - 1) return;
  __threadfence();
  const uint32_t aborted = load_word(control + ABORTED);
  if (aborted == 1) pass_on_report(launch);
  if (aborted) launch.state->abort = 1;
  tell_host(&launch.state->finished, aborted ? FINISH_STALLED : (int32_t)load_word(control + REASON));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) kogc_kernel(const __grid_constant__ kogc_launch launch) {
  Shared& shared = shared_state();
  Cursor streams = {launch.plan + launch.plan[PLAN_STREAMS] + 4 * blockIdx.x};
  const uint8_t* stream = launch.stream + streams.next_wide();
  const int64_t length = streams.next_wide();
  for (int i = threadIdx.x; i < SCRATCH_FLOATS; i += THREADS) ((float*)(shared_memory + NEAR_BEGIN))[i] = 0;
  // What lies behind the last position of a cache is multiplied by 0: it must not be a NaN.
  for (uint32_t i = threadIdx.x; i < RING_BYTES / 16; i += THREADS) ((uint4*)(shared_memory + RING_BEGIN))[i] = {};
  const int32_t* script = launch.plan + launch.plan[PLAN_SCRIPTS] + 2 * blockIdx.x;
  for (int i = threadIdx.x; i < script[1]; i += THREADS) ((int32_t*)(shared_memory + SCRIPT_BEGIN))[i] = launch.plan[script[0] + i];
  for (int i = threadIdx.x; i < CONSUMER_WARPS * KEPT; i += THREADS) (&shared.kept[0][0])[i] = 0;
  if (threadIdx.x == 0) {
    shared.launch = launch;
    shared.stop = shared.steps = shared.leave = shared.step = shared.entered = 0;
    shared.landed = 0;
    for (uint32_t& released : shared.released) released = 0;
    shared.nothing = 0;
    shared.window = at_most(WINDOW);
    for (Stream& s : shared.streams) s = {};
    for (int slot = 0; slot < SLOTS; ++slot) barrier_make(full_barrier(slot), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("fence.proxy.async;" ::: "memory");  // before the first copies into the ring
  __syncthreads();

  int32_t reason = FINISH_CANCELLED;
  if (threadIdx.x < CONSUMERS) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    Worker w;
    if (check_in(w)) reason = run_sequence(w);
    worker_sync(w);
    if (threadIdx.x == 0) *(volatile int32_t*)&shared.stop = 1;
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (threadIdx.x / 32 == CONSUMER_WARPS) watch(launch);
    if (threadIdx.x == CONSUMERS + 32) relay();
    if (threadIdx.x % 32 == 0 && threadIdx.x >= THREADS - 32 * PRODUCERS) {
      const Cursor feed = {launch.plan + launch.plan[launch.plan[PLAN_FEEDS] + blockIdx.x]};
      produce(launch, stream, length, feed, (THREADS - 1 - threadIdx.x) / 32);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) check_out(launch, blockIdx.x, reason);
}

#ifdef KOGC_PROFILE
constexpr int64_t PROBED = (int64_t)WORKERS * INSTANCES * 4;
#else
constexpr int64_t PROBED = PROBE_FLOATS;
#endif

// Facts the host checks before it runs anything.
extern "C" __device__ const int64_t kogc_facts[] = {LAUNCH_VERSION, WORKERS, TILE_ROWS, MAX_COLUMNS, VOCAB, CAPACITY, EXCHANGE_BYTES,
                                                    KV_BYTES, PROBED, PLAN_WORDS, THREADS, SHARED_BYTES};
