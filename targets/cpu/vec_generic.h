// Any CPU: plain C++ over the vector extension.
typedef uint16_t halves __attribute__((vector_size(2 * TILE_ROWS), aligned(2), may_alias));

DEVICE inline vec fma(vec a, vec b, vec c) { return a * b + c; }
DEVICE inline vec load(const bf16* p) { return (vec)(__builtin_convertvector(*(const halves*)p, ivec) << 16); }
DEVICE inline vec load(const fp16* p) {  // the product moves the exponent to where fp32 has it; subnormals come out normal
  const ivec bits = __builtin_convertvector(*(const halves*)p, ivec), magnitude = bits & 0x7fff;
  const ivec number = (ivec)((vec)(magnitude << 13) * broadcast(0x1p112f)), special = magnitude << 13 | 0x7f800000;
  return (vec)((magnitude >= 0x7c00 ? special : number) | (bits & 0x8000) << 16);
}
DEVICE NOINLINE bool any_not_below(vec v, vec limit) {  // some v ≥ limit, or NaN
  bool found = false;
  for (int i = 0; i < TILE_ROWS; ++i) found |= !(v[i] < limit[i]);
  return found;
}
// One vec whose element i is the sum of v[i].
DEVICE NOINLINE vec sums(const vec (&v)[TILE_ROWS]) {
  vec result;
  for (int i = 0; i < TILE_ROWS; ++i) {
    float total = v[i][0];
    for (int j = 1; j < TILE_ROWS; ++j) total += v[i][j];
    result[i] = total;
  }
  return result;
}
