// Telling the host. One condition for all launches of this library: whoever wakes looks at its own state again.
static pthread_mutex_t progress_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER;

static void tell_host(int32_t* word, int32_t value) {
  pthread_mutex_lock(&progress_mutex);
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
  pthread_cond_broadcast(&progress);
  pthread_mutex_unlock(&progress_mutex);
}

// Worker 0: ``produced`` tokens (teacher-forced: positions) are done; their values were stored before.
DEVICE void report(const Worker& w, int32_t produced) {
  if (w.id != 0) return;
  kogc_state& state = *w.launch->state;
  state.end_ns = clock_ns();
  if (!state.first_token_ns) state.first_token_ns = state.end_ns;
  tell_host(&state.produced, produced);
}

DEVICE void report_token(const Worker& w, int32_t index, int32_t token) {
  if (w.id == 0) w.launch->ring[index] = token;
  report(w, index + 1);
}

DEVICE void report_nan(const Worker& w) {
  if (w.id == 0) w.launch->state->nan_position = w.nan_position;
}
