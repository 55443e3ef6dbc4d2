// Choosing the next token from the logits of all workers (docs/sampling.md). Every worker does so for itself, from the same logits and
// the same random number: it would have to wait for the token otherwise.

// A token by its share of the candidates' weights.
DEVICE inline int32_t draw(const Candidates& c, uint64_t random) {
  uint64_t point = (uint64_t)((unsigned __int128)random * c.mass >> 64);  // below the mass
  int i = 0;
  for (; i < c.count - 1 && point >= weight_of(c.all[i]); ++i) point -= weight_of(c.all[i]);
  return token_of(c.all[i]);
}

// The token at context position ``position``; ``room`` holds VOCAB candidates.
DEVICE NOINLINE int32_t choose(const float* logits, const kogc_sampling& s, int32_t position, Candidate* room) {
  if (s.temperature == 0) {
    const float top = largest(logits);
    int32_t first = 0;
    while (first < VOCAB - 1 && logits[first] != top) ++first;
    return first;
  }
  Candidates found = candidates_of(logits, s.temperature, room);
  filter(found, s);
  return draw(found, random_bits(s.seed, (uint64_t)position));
}

// The ``n`` largest logits and their tokens, largest first, the first of equals first. Empty places: NOTHING.
DEVICE inline void find_top(const float* logits, int n, float* top, int32_t* tokens) {
  for (int i = 0; i < n; ++i) top[i] = NOTHING, tokens[i] = -1;
  for (int first = 0; n > 0 && first < VOCAB; first += TILE_ROWS) {
    const int rows = VOCAB - first < TILE_ROWS ? VOCAB - first : TILE_ROWS;
    if (rows == TILE_ROWS && !any_not_below(load(logits + first), broadcast(top[n - 1]))) continue;
    for (int row = first; row < first + rows; ++row) {
      if (tokens[n - 1] >= 0 && !(logits[row] > top[n - 1])) continue;
      int place = n - 1;
      for (; place > 0 && (tokens[place - 1] < 0 || logits[row] > top[place - 1]); --place) top[place] = top[place - 1], tokens[place] = tokens[place - 1];
      top[place] = logits[row], tokens[place] = row;
    }
  }
}

// What the host makes log-probabilities of, all logits less the largest: the chosen one's, Σ exp, then the top ones' and their tokens.
DEVICE NOINLINE void report_logprobs(const float* logits, int32_t chosen, int n, float* out) {
  const float top = largest(logits);
  auto below = [&](float x) { return x == top ? 0 : x - top; };
  double total = 0;
  int i = 0;
  for (; i + TILE_ROWS <= VOCAB; i += TILE_ROWS) total += sum(exp(load(logits + i) - broadcast(top)));
  for (; i < VOCAB; ++i) total += exp(below(logits[i]));
  out[0] = below(logits[chosen]);
  out[1] = (float)total;
  find_top(logits, n, out + 2, (int32_t*)(out + 2 + n));
  for (int k = 2; k < 2 + n; ++k) out[k] = below(out[k]);
}

// Choose from the kept logits of the step, in the place of the greedy choice.
DEVICE NOINLINE void sample(Worker& w) {
  const kogc_sampling& s = *w.launch->sampling;
  const int own = w.id / (WORKERS / LOGIT_COPIES);
  w.sampled = choose(kept_logits(w, own, false), s, w.position[w.columns - 1] + 1, w.room);
  if (w.id == 0 && s.top_logprobs >= 0)
    report_logprobs(kept_logits(w, own, true), w.sampled, s.top_logprobs, s.logprobs + (int64_t)w.produced * (2 + 2 * s.top_logprobs));
}
