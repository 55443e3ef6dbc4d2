// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a random number is a function of a key
// and a counter, so nothing is carried from token to token, and every worker finds the same one by itself.

// 64 random bits for ``counter`` of the sequence ``key``: the first two words of a block.
DEVICE inline uint64_t random_bits(uint64_t key, uint64_t counter) {
  uint32_t x[4] = {(uint32_t)counter, (uint32_t)(counter >> 32), 0, 0}, k[2] = {(uint32_t)key, (uint32_t)(key >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = (uint64_t)0xD2511F53 * x[0], b = (uint64_t)0xCD9E8D57 * x[2];
    const uint32_t next[4] = {(uint32_t)(b >> 32) ^ x[1] ^ k[0], (uint32_t)b, (uint32_t)(a >> 32) ^ x[3] ^ k[1], (uint32_t)a};
    for (int i = 0; i < 4; ++i) x[i] = next[i];
    k[0] += 0x9E3779B9;
    k[1] += 0xBB67AE85;
  }
  return (uint64_t)x[1] << 32 | x[0];
}
