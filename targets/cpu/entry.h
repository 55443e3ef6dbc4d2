// Workers get 4 MB of stack (attention keeps its blocks there) and no signals: those are the host's.
static bool start(Member& member) {
  pthread_attr_t attributes;
  sigset_t all, before;
  sigfillset(&all);
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, 4 << 20);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  const bool started = pthread_create(&member.thread, &attributes, run_worker, &member) == 0;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
  return started;
}

// Run a whole sequence and return when every worker has left: 0 (state.finished says how it ended), or 1 another launch
// version, 2 no memory, 3 no threads.
extern "C" __attribute__((visibility("default"))) int kogc_run(kogc_launch* launch) {
  if (launch->version != LAUNCH_VERSION) return 1;
  void *scratch = nullptr, *sampler = nullptr;
  if (posix_memalign(&scratch, 64, (size_t)WORKERS * SCRATCH_FLOATS * sizeof(float))) return 2;
  if (launch->mode == MODE_SAMPLE && posix_memalign(&sampler, 64, SAMPLER_BYTES)) return free(scratch), 2;
  Crew crew = {launch, (float*)scratch, 0, {}, (float*)sampler};
  Member members[WORKERS];
  kogc_state& state = *launch->state;
  int started = 0;
  for (; started < WORKERS; ++started) {
    members[started] = {&crew, {}, started, FINISH_CANCELLED};
    if (!start(members[started])) break;
  }
  if (started < WORKERS) __atomic_store_n(&state.cancel, 1, __ATOMIC_RELEASE);  // nobody gets past the check-in
  for (int i = 0; i < started; ++i) pthread_join(members[i].thread, nullptr);
  free(scratch);
  free(sampler);
  tell_host(&state.finished, state.abort ? FINISH_STALLED : members[0].reason);
  return started < WORKERS ? 3 : 0;
}

// Sleep until more than ``seen`` tokens are there or the launch has finished: 1; or until the time is over: 0.
extern "C" __attribute__((visibility("default"))) int kogc_wait(kogc_state* state, int32_t seen, int64_t timeout_ns) {
  timespec until;
  clock_gettime(CLOCK_REALTIME, &until);  // the clock of a static condition variable
  const int64_t end = until.tv_nsec + timeout_ns % 1000000000;
  until.tv_sec += timeout_ns / 1000000000 + end / 1000000000;
  until.tv_nsec = end % 1000000000;
  auto ready = [&] {
    return __atomic_load_n(&state->produced, __ATOMIC_ACQUIRE) > seen || __atomic_load_n(&state->finished, __ATOMIC_ACQUIRE);
  };
  pthread_mutex_lock(&progress_mutex);
  while (!ready())
    if (pthread_cond_timedwait(&progress, &progress_mutex, &until)) break;
  const int result = ready();
  pthread_mutex_unlock(&progress_mutex);
  return result;
}

// Facts the host checks before it runs anything; −1 for a question this kernel does not know.
extern "C" __attribute__((visibility("default"))) int64_t kogc_query(int what) {
  const int64_t facts[] = {LAUNCH_VERSION, WORKERS, TILE_ROWS, MAX_COLUMNS, VOCAB, CAPACITY, EXCHANGE_BYTES, KV_BYTES, PROBE_FLOATS, PLAN_WORDS};
  return what >= 0 && what < (int)(sizeof facts / sizeof *facts) ? facts[what] : -1;
}
