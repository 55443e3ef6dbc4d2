// AVX2, FMA and F16C: eight rows in one register.
#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "this kernel is laid out for AVX2 with FMA and F16C: compile with -march=x86-64-v3 or newer"
#endif
#include <immintrin.h>
static_assert(TILE_ROWS == 8, "AVX2 holds 8 fp32 values");

DEVICE inline vec fma(vec a, vec b, vec c) { return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
DEVICE inline vec load(const fp16* p) { return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
DEVICE inline vec load(const bf16* p) {
  return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
}
DEVICE inline bool any_not_below(vec v, vec limit) {  // some v ≥ limit, or NaN
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)v, (__m256)limit, _CMP_NLT_UQ)) != 0;
}
// One vec whose element i is the sum of v[i].
DEVICE inline vec sums(const vec (&v)[8]) {
  const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps((__m256)v[0], (__m256)v[1]), _mm256_hadd_ps((__m256)v[2], (__m256)v[3]));
  const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps((__m256)v[4], (__m256)v[5]), _mm256_hadd_ps((__m256)v[6], (__m256)v[7]));
  return (vec)_mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
