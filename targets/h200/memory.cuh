// The instructions of the memory system that C++ has no words for.

DEVICE uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// Exchanged words: relaxed, at the scope of the whole GPU, so that they are read from and written to the L2 cache.
DEVICE uint4 load_words(const uint32_t* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEVICE uint32_t load_word(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void store_word(uint32_t* p, uint32_t v) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }

// What the host reads while the kernel runs: after everything this thread has written before.
DEVICE void tell_host(int32_t* p, int32_t v) { asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }

// Words of shared memory by which threads of a block tell each other what they have done.
DEVICE uint32_t load_acquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared_address(p)) : "memory");
  return v;
}
DEVICE void store_release(uint32_t* p, uint32_t v) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared_address(p)), "r"(v) : "memory");
}

// Barriers in shared memory that count arrivals of threads and bytes of bulk copies.
DEVICE void barrier_make(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE bool barrier_passed(uint32_t barrier, uint32_t phase) {
  uint32_t passed;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(passed) : "r"(barrier), "r"(phase) : "memory");
  return passed;
}

// Arrive, and let the barrier wait for ``bytes`` of bulk copies.
DEVICE void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Copy ``bytes`` (a multiple of 16) from global to shared memory, past what the L2 cache should keep; ``barrier`` counts them when
// they are there.
DEVICE void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  uint64_t read_once;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(read_once));
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(read_once) : "memory");
}

DEVICE int64_t clock_ns() {
  int64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
