// The watching warp, so that the others need not: it tells the producer how many steps all workers have completed, hears when
// the host or another worker wants everybody to leave, and says so itself when this worker has made no progress for too long.

// This worker waits in vain: leave a report, and have everybody leave.
DEVICE void give_up(const kogc_launch& launch) {
  const Shared& shared = shared_state();
  Report& report = report_of(launch, blockIdx.x);
  report.stage = shared.place.stage, report.iteration = shared.place.iteration, report.step = shared.step;
  report.worker = blockIdx.x, report.entered = shared.entered, report.filled = 1;
  __threadfence();
  atomicExch(launch.control + ABORTED, 1u);
  atomicExch(launch.control + LEAVE, 1u);
}

DEVICE bool all_completed(const kogc_launch& launch, uint32_t step) {
  bool waiting = false;
  for (int worker = threadIdx.x % 32; worker < WORKERS; worker += 32) waiting |= load_word(&report_of(launch, worker).steps) < step;
  return !__any_sync(~0u, waiting);
}

DEVICE void watch(const kogc_launch& launch) {
  Shared& shared = shared_state();
  const bool first = threadIdx.x % 32 == 0;
  uint32_t step = 1;
  int32_t entered = -1;
  int64_t since = 0;
  while (!stopped()) {
    // Others are asked only once this worker has itself come so far: their words are on the way of everybody's exchange.
    if (*(volatile int32_t*)&shared.step >= (int32_t)step && all_completed(launch, step)) {
      __threadfence();
      if (first) *(volatile int32_t*)&shared.steps = (int32_t)step;
      ++step;
    }
    const int64_t now = clock_ns();
    const int32_t seen = *(volatile int32_t*)&shared.entered;
    if (seen != entered) entered = seen, since = now;
    if (first && !shared.leave && seen > 0) {
      // When others have given up, this worker's wait may still be the one to blame: it comes first in the program.
      const bool asked = load_word(launch.control + LEAVE), late = now - since > launch.spin_limit_ns;
      if (late || load_word(launch.control + ABORTED) == 1) give_up(launch);
      if (late || asked) *(volatile int32_t*)&shared.leave = 1;
    }
    __syncwarp();
    __nanosleep(300);
  }
}
