// Exchange between workers. A buffer holds ``slots`` writes of [MAX_COLUMNS][lanes][pitch] floats and, per worker, one flag
// on a cache line of its own: the highest write index this worker has published, plus one. Write k of step s has index
// s · writes + k and lies in slot index mod slots.
//
// Memory order. A worker stores its values, then its flag with release; a reader loads the flag with acquire, then the
// values: seeing the flag, it sees the values. A slot is written again only by a worker that has, through such a pair,
// received something every reader could publish only after reading the slot (the plan is checked for it), so the second
// store cannot overtake the first load. Flags only grow: a late reader finds a larger one and needs nothing more.
struct Buffer { int64_t data, flags; int lanes, pitch, slots, writes; };  // data, flags: bytes from the exchange's begin

// One write of a buffer, or a worker's scratch: vector ``lane`` of column t.
struct View {
  float* values;
  int lanes, pitch;
  float* at(int t, int lane) const { return values + (t * lanes + lane) * pitch; }
};
// A write under way, and its index.
struct Outgoing : View { int64_t index; };
typedef float* Row;  // rows of a vector of an Outgoing

DEVICE inline int64_t write_index(const Worker& w, const Buffer& buffer, int write) { return w.step * buffer.writes + write; }

DEVICE inline View view(const Worker& w, const Buffer& buffer, int64_t index) {
  float* data = (float*)(w.launch->exchange + buffer.data);
  return {data + index % buffer.slots * MAX_COLUMNS * buffer.lanes * buffer.pitch, buffer.lanes, buffer.pitch};
}

DEVICE inline Outgoing outgoing(const Worker& w, const Buffer& buffer, int write, Place) {
  const int64_t index = write_index(w, buffer, write);
  return {view(w, buffer, index), index};
}

DEVICE inline int64_t* flag_of(const Worker& w, const Buffer& buffer, int worker) {
  return (int64_t*)(w.launch->exchange + buffer.flags + worker * 64);
}

DEVICE inline void publish(Worker& w, const Buffer& buffer, const Outgoing& made, Place place) {
  const int fault = fault_at(w, place);
  if (fault == FAULT_DROPPED_PUBLISH) return;
  __atomic_store_n(flag_of(w, buffer, w.id), made.index + (fault == FAULT_WRONG_SLOT ? 0 : 1), __ATOMIC_RELEASE);
}

template <int T>
DEVICE inline void publish_best(Worker& w, const Buffer& buffer, const Outgoing& made, Place place) {
  for (int t = 0; t < T; ++t) *(Best*)made.at(t, w.id) = w.best[t];
  publish(w, buffer, made, place);
}

// The largest logit of column t over all workers: the first of equals; index −1 when one of them met a NaN.
DEVICE inline Best best_of(const Worker&, View best, int t) {
  Best top = {NOTHING, INT32_MAX};
  for (int worker = 0; worker < WORKERS; ++worker) {
    const Best& found = *(const Best*)best.at(t, worker);
    if (found.index < 0) return found;
    if (found.logit > top.logit || (found.logit == top.logit && found.index < top.index)) top = found;
  }
  return top;
}

// Say where and for whom this worker waits in vain, unless an earlier wait is to blame; everybody leaves.
DEVICE NOINLINE void give_up(const Worker& w, Place place, int peer, int64_t expected, int64_t seen) {
  kogc_state& state = *w.launch->state;
  while (__atomic_exchange_n(&w.blame->pen, 1, __ATOMIC_ACQUIRE)) sched_yield();
  if (!read_flag(&state.abort) || w.entered < w.blame->entered) {
    w.blame->entered = w.entered;
    state.abort_stage = place.stage;
    state.abort_iteration = place.iteration;
    state.abort_worker = w.id;
    state.abort_peer = peer;
    state.abort_step = (int32_t)w.step;
    state.abort_expected = expected;
    state.abort_seen = seen;
    __atomic_store_n(&state.abort, 1, __ATOMIC_RELEASE);
  }
  __atomic_store_n(&w.blame->pen, 0, __ATOMIC_RELEASE);
}

// Wait until ``flag`` has passed ``index``: first busily, then giving the core away, then asleep, so that more workers than
// cores still finish. One poll counts 10 ms at most: time in which this process was stopped or had no core is not patience.
// False: cancelled, aborted, or the limit has passed.
DEVICE NOINLINE bool wait_for(Worker& w, const int64_t* flag, int64_t index, int peer, Place place) {
  int64_t waited = 0, before = clock_ns();
  for (int round = 0;; ++round) {
    int64_t seen = 0;
    for (int i = 0; i < 64; ++i) {
      seen = __atomic_load_n(flag, __ATOMIC_ACQUIRE);
      if (seen > index) return true;
      cpu_relax();
    }
    prefetch_while_waiting(w);
    if (leaving(w)) {
      if (read_flag(&w.launch->state->abort)) give_up(w, place, peer, index, seen - 1);
      return false;
    }
    const timespec nap = {0, 50000};
    if (round > 2000) nanosleep(&nap, nullptr);
    else if (round > 16) sched_yield();
    const int64_t now = clock_ns(), most = 10000000;
    waited += now - before < most ? now - before : most;
    before = now;
    if (waited > w.launch->spin_limit_ns) return give_up(w, place, peer, index, seen - 1), false;
  }
}

// Wait for write ``write`` of this step from every worker in the intervals that ``work`` lists next; ``found`` is where it lies.
DEVICE inline bool await(Worker& w, const Buffer& buffer, int write, Cursor& work, Place place, View& found) {
  const int64_t index = write_index(w, buffer, write);
  found = view(w, buffer, index);
  for (int intervals = work.next(); intervals > 0; --intervals) {
    const int first = work.next(), last = work.next();
    for (int peer = first; peer < last; ++peer) {
      const int64_t* flag = flag_of(w, buffer, peer);
      if (__atomic_load_n(flag, __ATOMIC_ACQUIRE) <= index && !wait_for(w, flag, index, peer, place)) return false;
    }
  }
  return true;
}

// All operands of a stage are here: here they were waited for one by one.
DEVICE inline bool received(const Worker&) { return true; }
