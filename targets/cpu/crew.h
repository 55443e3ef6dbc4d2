// ── entry points ──

// What the threads of one launch share besides the launch itself.
struct Crew {
  const kogc_launch* launch;
  float* scratch;
  int64_t arrived;
  Blame blame;
  float* kept;  // logits for the sampler, then every worker's candidates; null where nothing is sampled
};
struct Member {
  Crew* crew;
  pthread_t thread;
  int32_t id, reason;
};

constexpr size_t SAMPLER_BYTES = KEPT_FLOATS * sizeof(float) + (size_t)WORKERS * VOCAB * sizeof(Candidate);

static void lend_sampler(Worker& w, const Crew& crew) {
  if (!crew.kept) return;
  w.kept = crew.kept;
  w.room = (Candidate*)(crew.kept + KEPT_FLOATS) + (int64_t)w.id * VOCAB;
}

// Nobody starts before everybody is there: a thread that never runs is found here, not in the middle of a token.
static bool check_in(Worker& w, Crew& crew) {
  __atomic_add_fetch(&crew.arrived, 1, __ATOMIC_ACQ_REL);
  if (!wait_for(w, &crew.arrived, WORKERS - 1, -1, {-1, 0})) return false;
  if (w.id == 0) w.launch->state->start_ns = clock_ns();
  return true;
}
