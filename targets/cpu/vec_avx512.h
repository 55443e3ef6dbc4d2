// AVX-512: sixteen rows in one register.
#if !defined(__AVX512F__)
#error "this kernel is laid out for AVX-512: compile with -march=x86-64-v4 or newer"
#endif
#include <immintrin.h>
static_assert(TILE_ROWS == 16, "AVX-512 holds 16 fp32 values");

DEVICE inline vec fma(vec a, vec b, vec c) { return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
DEVICE inline vec load(const fp16* p) { return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
DEVICE inline vec load(const bf16* p) {
  return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
DEVICE inline bool any_not_below(vec v, vec limit) {  // some v ≥ limit, or NaN
  return _mm512_cmp_ps_mask((__m512)v, (__m512)limit, _CMP_NLT_UQ) != 0;
}
// One vec whose element i is the sum of v[i].
DEVICE inline vec sums(const vec (&v)[16]) {
  vec result;
  for (int i = 0; i < 16; ++i) result[i] = _mm512_reduce_add_ps((__m512)v[i]);
  return result;
}
