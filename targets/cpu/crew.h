// ── entry points ──

// What the threads of one launch share besides the launch itself.
struct Crew {
  const kogc_launch* launch;
  float* scratch;
  int64_t arrived;
  Blame blame;
};
struct Member {
  Crew* crew;
  pthread_t thread;
  int32_t id, reason;
};

// Nobody starts before everybody is there: a thread that never runs is found here, not in the middle of a token.
static bool check_in(Worker& w, Crew& crew) {
  __atomic_add_fetch(&crew.arrived, 1, __ATOMIC_ACQ_REL);
  if (!wait_for(w, &crew.arrived, WORKERS - 1, -1, {-1, 0})) return false;
  if (w.id == 0) w.launch->state->start_ns = clock_ns();
  return true;
}
