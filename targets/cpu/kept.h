// Logits that are kept: for the host when it asked for them, or for the sampler (launches that sample only; docs/sampling.md). There,
// the worker that makes a logit keeps it, in the memory of every rank, before it publishes its best; so who has heard from all
// workers finds all logits. As many steps are kept as ``best`` has slots: what is proven of its slots holds for these.

constexpr int64_t KEPT_FLOATS = (int64_t)LOGIT_COPIES * LOGIT_SLOTS * 2 * VOCAB;

// The logits of this step in rank ``copy``'s memory: as the model made them when ``raw`` (log-probabilities only), else penalised and biased.
DEVICE inline float* kept_logits(const Worker& w, int copy, bool raw) {
  return w.kept + (((int64_t)copy * LOGIT_SLOTS + w.step % LOGIT_SLOTS) * 2 + raw) * VOCAB;
}

// Penalties as in vLLM: repetition (Keskar et al., "CTRL", 2019) of all that was seen; frequency and presence (OpenAI) of what was made.
DEVICE inline float penalised(const kogc_sampling& s, int row, float x) {
  const uint32_t seen = s.history[row], made = seen & ~IN_PROMPT;
  if (seen) x = x > 0 ? x / s.repetition_penalty : x * s.repetition_penalty;
  return made ? x - s.frequency_penalty * (float)made - s.presence_penalty : x;
}

// Rows are penalised and counted by the worker that makes them, so nobody else needs to know how often a token was made.
DEVICE inline vec prepared(const Worker& w, const kogc_sampling& s, int row, int n, vec v) {
  if (s.history) {
    const int32_t fed = w.token[w.columns - 1];
    if (w.produced > 0 && fed >= row && fed < row + n) ++s.history[fed];
    for (int i = 0; i < n; ++i) v[i] = penalised(s, row + i, v[i]);
  }
  return s.bias ? v + load_first(s.bias + row, n) : v;
}

DEVICE NOINLINE void keep_logits(const Worker& w, int t, int row, int n, vec v) {
  auto keep = [&](float* to, vec kept) { n == TILE_ROWS ? store(to + row, kept) : store_first(to + row, kept, n); };
  const kogc_launch& launch = *w.launch;
  if (launch.mode == MODE_TEACHER_FORCED) return keep(launch.logits + (int64_t)(w.position[t] - launch.start_position) * VOCAB, v);
  if (t != w.columns - 1) return;
  const vec ready = prepared(w, *launch.sampling, row, n, v);
  for (int copy = 0; copy < LOGIT_COPIES; ++copy) {
    keep(kept_logits(w, copy, false), ready);
    if (launch.sampling->top_logprobs >= 0) keep(kept_logits(w, copy, true), v);
  }
}
