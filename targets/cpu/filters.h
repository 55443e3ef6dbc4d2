// Which tokens may be drawn, and how likely (docs/sampling.md). Weights are whole numbers: their sums are exact, so no sum depends
// on the order in which it is made. Every filter keeps a beginning of the tokens in the order of their weights, the first of equals first.

// A token: its weight in the upper half, its index with all bits turned over in the lower, so that a larger key comes first.
typedef uint64_t Candidate;
DEVICE inline uint64_t weight_of(Candidate c) { return c >> 32; }
DEVICE inline int32_t token_of(Candidate c) { return (int32_t)~(uint32_t)c; }

struct Candidates {
  Candidate* all;
  int count;
  uint64_t mass;  // the sum of their weights
};

constexpr int WEIGHT_ONE = 1 << 30;  // the likeliest token's weight

DEVICE inline float largest(const float* logits) {
  vec top = broadcast(NOTHING);
  int i = 0;
  for (; i + TILE_ROWS <= VOCAB; i += TILE_ROWS) {
    const vec v = load(logits + i);
    top = v > top ? v : top;
  }
  float best = maximum(top);
  for (; i < VOCAB; ++i) best = logits[i] > best ? logits[i] : best;
  return best;
}

// exp((x − top) / temperature) in units of 1 / WEIGHT_ONE, rounded down. An infinite top keeps its own weight.
DEVICE inline ivec weights(vec x, float top, float temperature) {
  const vec below = x == broadcast(top) ? vec{} : (x - broadcast(top)) / broadcast(temperature);
  return __builtin_convertvector(exp(below) * broadcast((float)WEIGHT_ONE), ivec);
}

// All tokens of some weight; ``room`` holds VOCAB of them.
DEVICE inline Candidates candidates_of(const float* logits, float temperature, Candidate* room) {
  const float top = largest(logits);
  Candidates found = {room, 0, 0};
  for (int i = 0; i < VOCAB; i += TILE_ROWS) {
    const ivec weight = weights(load_at<VOCAB>(logits, i), top, temperature);
    const int rows = VOCAB - i < TILE_ROWS ? VOCAB - i : TILE_ROWS;
    for (int j = 0; j < rows; ++j) {  // stored in any case, and then counted or not: a branch would be taken at random
      found.all[found.count] = (uint64_t)weight[j] << 32 | (uint32_t)~(i + j);
      found.count += weight[j] > 0;
      found.mass += weight[j];
    }
  }
  return found;
}

DEVICE inline void swap(Candidate& a, Candidate& b) {
  const Candidate c = a;
  a = b;
  b = c;
}

// The index of the middle one of the first, middle and last of all[low … high).
DEVICE inline int middle(const Candidate* all, int low, int high) {
  const int mid = low + (high - low) / 2, last = high - 1;
  const bool a = all[low] < all[mid], b = all[mid] < all[last], c = all[low] < all[last];
  return a == b ? mid : a == c ? last : low;
}

// Keep the fewest first candidates that are ``count``, or whose weights come to ``mass``; all of them must be enough. A quickselect:
// of all[low … high), the candidates that may be the last one kept, those before a pivot are brought to the front and summed up.
DEVICE NOINLINE void keep_first(Candidates& c, int count, uint64_t mass) {
  uint64_t before = 0;  // the weights of all[0 … low), which are kept
  for (int low = 0, high = c.count; low < high;) {
    swap(c.all[middle(c.all, low, high)], c.all[high - 1]);
    const Candidate pivot = c.all[high - 1];
    uint64_t sum = before;
    int at = low;
    for (int i = low; i < high - 1; ++i) {
      const Candidate one = c.all[i];
      const bool first = one > pivot;
      c.all[i] = c.all[at];
      c.all[at] = one;
      at += first;
      sum += first ? weight_of(one) : 0;
    }
    swap(c.all[at], c.all[high - 1]);
    if (at >= count || sum >= mass) {
      high = at;
      continue;
    }
    sum += weight_of(pivot);
    if (at + 1 >= count || sum >= mass) {
      c.count = at + 1;
      c.mass = sum;
      return;
    }
    low = at + 1;
    before = sum;
  }
}

// Keep the candidates of at least this weight.
DEVICE inline void keep_heavy(Candidates& c, double least) {
  const Candidates old = c;
  c.count = 0, c.mass = 0;
  for (int i = 0; i < old.count; ++i) {
    const Candidate one = old.all[i];
    if (weight_of(one) < least) continue;
    c.all[c.count++] = one;
    c.mass += weight_of(one);
  }
}

// Top-k, then top-p of what is left, then min-p: each as in vLLM, with ties broken by the lower index.
DEVICE inline void filter(Candidates& c, const kogc_sampling& s) {
  if (s.top_k > 0 && s.top_k < c.count) keep_first(c, s.top_k, UINT64_MAX);
  if (s.top_p < 1) {
    const double wanted = s.top_p * (double)c.mass;
    const uint64_t mass = (uint64_t)wanted + ((double)(uint64_t)wanted < wanted);
    keep_first(c, c.count, mass < 1 ? 1 : mass);
  }
  if (s.min_p > 0) keep_heavy(c, s.min_p * WEIGHT_ONE);
}
