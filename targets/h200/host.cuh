// Telling the host, through memory that both see.

// Worker 0: ``produced`` tokens (teacher-forced: positions) are done; their values were stored before.
DEVICE void report(const Worker& w, int32_t produced) {
  if (w.id != 0 || w.thread != 0) return;
  kogc_state& state = *w.launch->state;
  const int64_t now = clock_ns();
  state.end_ns = now;
  if (produced == 1 || w.launch->mode == MODE_TEACHER_FORCED) state.first_token_ns = now;
  tell_host(&state.produced, produced);
}

DEVICE void report_token(const Worker& w, int32_t index, int32_t token) {
  if (w.id == 0 && w.thread == 0) w.launch->ring[index] = token;
  report(w, index + 1);
}

DEVICE void report_nan(const Worker& w) {
  if (w.id == 0 && w.thread == 0) w.launch->state->nan_position = w.nan_position;
}
