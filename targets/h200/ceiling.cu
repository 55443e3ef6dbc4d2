// How fast this GPU reads memory at best. Every block copies a part of its own of the bytes into shared memory, over and over,
// through a ring of bulk copies as a kernel's weight stream does, and looks at nothing. One thread a block does it all.
//
// The host defines CHUNK_BYTES (of one copy, a multiple of 16) and SLOTS (copies under way).
#include <stdint.h>

#define DEVICE static __device__ __forceinline__

constexpr int LINE_BYTES = 128;

DEVICE uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// A barrier that is passed when all bytes of a copy are there.
DEVICE void barrier_make(uint32_t barrier) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory"); }
DEVICE void barrier_wait(uint32_t barrier, uint32_t phase) {
  uint32_t passed = 0;
  while (!passed)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(passed) : "r"(barrier), "r"(phase) : "memory");
}

DEVICE void copy_bulk(uint32_t to, const uint8_t* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Bytes ``begin`` … ``end``, copied chunk by chunk, round and round. The last chunk may be short.
struct Part {
  const uint8_t *begin, *end, *at;

  __device__ __forceinline__ int64_t chunks() const { return (end - begin + CHUNK_BYTES - 1) / CHUNK_BYTES; }
  __device__ __forceinline__ void copy_next(uint32_t to, uint32_t barrier) {
    const uint32_t bytes = end - at < CHUNK_BYTES ? (uint32_t)(end - at) : CHUNK_BYTES;
    copy_bulk(to, at, bytes, barrier);
    at += bytes;
    if (at == end) at = begin;
  }
};

// Block ``index`` of ``count`` gets whole lines of ``data`` (``bytes`` bytes, a multiple of 16), the last one also what is left.
DEVICE Part part_of(const uint8_t* data, int64_t bytes, int64_t index, int64_t count) {
  const int64_t lines = bytes / LINE_BYTES;
  const uint8_t* begin = data + lines * index / count * LINE_BYTES;
  return {begin, index + 1 == count ? data + bytes : data + lines * (index + 1) / count * LINE_BYTES, begin};
}

// Read ``bytes`` bytes from ``data`` (16-byte aligned) ``repeats`` times; up to 15 bytes at the end are left out.
extern "C" __global__ void __launch_bounds__(32) kogc_read(const uint8_t* data, int64_t bytes, int32_t repeats) {
  extern __shared__ __align__(128) uint8_t ring[];  // [SLOTS][CHUNK_BYTES]
  __shared__ uint64_t landed[SLOTS];
  if (threadIdx.x != 0) return;
  Part part = part_of(data, bytes / 16 * 16, blockIdx.x, gridDim.x);
  const int64_t total = part.chunks() * repeats;

  for (int slot = 0; slot < SLOTS; ++slot) barrier_make(shared_address(&landed[slot]));
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  for (int slot = 0; slot < SLOTS && slot < total; ++slot)
    part.copy_next(shared_address(ring) + slot * CHUNK_BYTES, shared_address(&landed[slot]));
  int slot = 0;
  uint32_t phase = 0;
  for (int64_t done = 0; done < total; ++done) {
    const uint32_t barrier = shared_address(&landed[slot]);
    barrier_wait(barrier, phase);
    if (done + SLOTS < total) part.copy_next(shared_address(ring) + slot * CHUNK_BYTES, barrier);
    if (++slot == SLOTS) slot = 0, phase ^= 1;
  }
}
