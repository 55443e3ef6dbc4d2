// A vec is one tile of rows: TILE_ROWS fp32 values, and an ordinary value with + − · / (the compiler's vector extension).
typedef float vec __attribute__((vector_size(4 * TILE_ROWS)));
typedef int32_t ivec __attribute__((vector_size(4 * TILE_ROWS)));
typedef float vec_in_memory __attribute__((vector_size(4 * TILE_ROWS), aligned(4), may_alias));

DEVICE inline vec broadcast(float x) { return x - vec{}; }
DEVICE inline ivec broadcast(int32_t x) { return x - ivec{}; }
DEVICE inline vec load(const float* p) { return *(const vec_in_memory*)p; }
DEVICE inline void store(float* p, vec v) { *(vec_in_memory*)p = v; }

DEVICE inline float bits_to_float(uint32_t bits) { float x; __builtin_memcpy(&x, &bits, 4); return x; }
DEVICE inline uint32_t float_to_bits(float x) { uint32_t bits; __builtin_memcpy(&bits, &x, 4); return bits; }

// Rounding to a storage dtype is to nearest, ties to even, as PyTorch does it.
DEVICE inline void from_float(float* to, float x) { *to = x; }
DEVICE inline void from_float(bf16* to, float x) {
  const uint32_t bits = float_to_bits(x);
  to->bits = x != x ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
DEVICE inline void from_float(fp16* to, float x) {
  const uint32_t sign = float_to_bits(x) >> 16 & 0x8000, magnitude = float_to_bits(x) & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) half = 0x7e00;
  else if (magnitude >= 0x477ff000) half = 0x7c00;  // rounds past the largest fp16
  else if (magnitude < 0x38800000) half = float_to_bits(bits_to_float(magnitude) + 0.5f) - float_to_bits(0.5f);  // units of 2⁻²⁴
  else half = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  to->bits = sign | half;
}
template <class Stored>
DEVICE inline void store(Stored* p, vec v) {
  for (int i = 0; i < TILE_ROWS; ++i) from_float(p + i, v[i]);
}
