// The largest logit a worker has seen and its vocabulary index; index −1: one of the logits was NaN.
struct Best { float logit; int32_t index; };

// A worker's weights in the order it reads them; the same bytes every step. ``ahead`` is where prefetching while waiting got to.
struct Stream { const uint8_t *first, *last, *next, *ahead; };

// Which wait is to blame when a launch is aborted: the one that comes first in the program among all that did not end. The
// others are its consequences, the culprit's own among them. ``entered`` orders waits; ``pen`` is a lock.
struct Blame { int64_t entered; int32_t pen; };

struct Worker {
  const kogc_launch* launch;
  const int32_t* plan;
  float* scratch;
  int id;
  Stream stream;
  // The step: its number since the launch, and what its columns hold. Unused columns repeat the last used one.
  int64_t step;
  int columns;
  // Tokens of the prompt that have been fed, and tokens generated.
  int32_t fed, produced;
  bool wants_logits;
  int32_t token[MAX_COLUMNS], position[MAX_COLUMNS];
  Best best[MAX_COLUMNS];
  // What all workers' best logits came to: the token after the last column, or −1 when a column's logits held a NaN.
  int32_t sampled, nan_position;
  // Launches that sample only: the logits that are kept for all ranks, and room for this worker's candidates.
  float* kept;
  uint64_t* room;
  // Stages entered since the launch: every worker enters all of them in the same order.
  int64_t entered;
  Blame* blame;
};

// Where in the program a worker is: stage number in source order, iteration of its segment. For reports and faults only.
struct Place { int stage, iteration; };

DEVICE inline int32_t read_flag(const int32_t* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }

// The host cancelled, or another worker gave up. Asked in every wait and at every step.
DEVICE inline bool leaving(const Worker& w) { return read_flag(&w.launch->state->cancel) || read_flag(&w.launch->state->abort); }

DEVICE inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Fault injection (builds with KOGC_FAULT only): which fault hits this worker here, 0 for none.
DEVICE inline int fault_at(const Worker& w, Place place) {
#ifdef KOGC_FAULT
  const kogc_launch& l = *w.launch;
  return l.fault_stage == place.stage && l.fault_worker == w.id ? l.fault : 0;
#else
  return (void)w, (void)place, 0;
#endif
}

// Begin a stage. False when the worker must leave.
DEVICE inline bool enter(Worker& w, Place place) {
  ++w.entered;
  while (fault_at(w, place) == FAULT_STUCK) {
    if (leaving(w)) return false;
    sched_yield();
  }
  return true;
}
