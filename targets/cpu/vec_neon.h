// AArch64 NEON: eight rows in two registers, or four in one.
#if !defined(__aarch64__)
#error "this kernel is laid out for AArch64"
#endif
#include <arm_neon.h>
static_assert(TILE_ROWS % 4 == 0, "NEON registers hold 4 fp32 values");

union Quads { vec whole; float32x4_t part[TILE_ROWS / 4]; };

DEVICE inline vec fma(vec a, vec b, vec c) {
  Quads x = {a}, y = {b}, z = {c};
  for (int i = 0; i < TILE_ROWS / 4; ++i) z.part[i] = vfmaq_f32(z.part[i], x.part[i], y.part[i]);
  return z.whole;
}
DEVICE inline vec load(const fp16* p) {
  Quads x;
  for (int i = 0; i < TILE_ROWS / 4; ++i) x.part[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p[4 * i].bits)));
  return x.whole;
}
DEVICE inline vec load(const bf16* p) {
  Quads x;
  for (int i = 0; i < TILE_ROWS / 4; ++i) x.part[i] = vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(&p[4 * i].bits)), 16));
  return x.whole;
}
DEVICE inline bool any_not_below(vec v, vec limit) {  // some v ≥ limit, or NaN
  Quads x = {v}, y = {limit};
  uint32_t below = ~0u;
  for (int i = 0; i < TILE_ROWS / 4; ++i) below &= vminvq_u32(vcltq_f32(x.part[i], y.part[i]));
  return below == 0;
}
// One vec whose element i is the sum of v[i].
DEVICE inline vec sums(const vec (&v)[TILE_ROWS]) {
  vec result;
  for (int i = 0; i < TILE_ROWS; ++i) {
    Quads x = {v[i]};
    for (int q = 1; q < TILE_ROWS / 4; ++q) x.part[0] = vaddq_f32(x.part[0], x.part[q]);
    result[i] = vaddvq_f32(x.part[0]);
  }
  return result;
}
