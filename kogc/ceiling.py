"""How fast this machine reads memory at best: the number every speed is judged by.

Measured by a loop that only adds up what it reads, over the very bytes an artifact streams per token and with as many
threads as it has workers, each on a processor of its own and on a part of its own. So a model that fits into a cache is
held against the cache.
"""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np

from kogc.targets.cpu import toolchain

#: Rounds over the bytes; the best one counts. A round over fewer bytes than this is repeated inside.
_ROUNDS = 5
_ROUND_BYTES = 32 << 20

_SOURCE = r"""
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <time.h>

struct Reader {
  const uint64_t* words;
  int64_t count;
  int64_t repeats;
  int* arrived;
  int threads, cpu;
  uint64_t sum;
  double start, end;
};

static double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}

// Left to itself, a busy machine's scheduler may put two readers onto one processor for all of the short time they run.
static void move_to(int cpu) {
#ifdef __linux__
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  if (cpu >= 0) pthread_setaffinity_np(pthread_self(), sizeof one, &one);
#endif
}

// Thirty-two sums side by side: with vectors of any width the loop waits for memory and not for its own additions.
// The prefetch distance is the best of 0, 1, 2, 4 and 8 KB (measured on EPYC Milan: 30, 32, 33, 31, 30 GB/s).
static void* read_all(void* argument) {
  Reader& reader = *(Reader*)argument;
  uint64_t sums[32] = {};
  move_to(reader.cpu);
  __atomic_add_fetch(reader.arrived, 1, __ATOMIC_ACQ_REL);
  while (__atomic_load_n(reader.arrived, __ATOMIC_ACQUIRE) < reader.threads) sched_yield();
  reader.start = now();
  for (int64_t r = 0; r < reader.repeats; ++r)
    for (int64_t i = 0; i + 32 <= reader.count; i += 32) {
      for (int j = 0; j < 32; j += 8) __builtin_prefetch(reader.words + i + 256 + j);
      for (int j = 0; j < 32; ++j) sums[j] += reader.words[i + j] ^ (uint64_t)r;
    }
  reader.end = now();
  for (uint64_t sum : sums) reader.sum += sum;
  return nullptr;
}

// The processors this process may use, in turn; −1 where the system does not say.
static void choose_cpus(Reader* readers, int threads) {
  for (int t = 0; t < threads; ++t) readers[t].cpu = -1;
#ifdef __linux__
  cpu_set_t usable;
  if (sched_getaffinity(0, sizeof usable, &usable) || CPU_COUNT(&usable) < threads) return;
  for (int cpu = 0, t = 0; t < threads; ++cpu)
    if (CPU_ISSET(cpu, &usable)) readers[t++].cpu = cpu;
#endif
}

// Seconds that `threads` threads, all there, take to read `count` words `repeats` times, each its own part: from the first
// to begin to the last to end. `sink` keeps the sum. Negative: a thread could not be made.
extern "C" double kogc_read(const uint64_t* words, int64_t count, int threads, int64_t repeats, uint64_t* sink) {
  enum { MOST = 1024 };
  static pthread_t ids[MOST];
  static Reader readers[MOST];
  if (threads > MOST) threads = MOST;
  choose_cpus(readers, threads);
  const int64_t part = count / threads / 8 * 8;
  int arrived = 0, made = 0;
  for (; made < threads; ++made) {
    readers[made] = {words + made * part, part, repeats, &arrived, threads, readers[made].cpu, 0, 0, 0};
    if (pthread_create(&ids[made], nullptr, read_all, &readers[made]) != 0) break;
  }
  if (made < threads) __atomic_add_fetch(&arrived, threads, __ATOMIC_ACQ_REL);  // lets the others go
  double start = 0, end = 0;
  for (int t = 0; t < made; ++t) {
    pthread_join(ids[t], nullptr);
    *sink += readers[t].sum;
    if (t == 0 || readers[t].start < start) start = readers[t].start;
    if (t == 0 || readers[t].end > end) end = readers[t].end;
  }
  return made < threads ? -1 : end - start;
}
"""


def read_ceiling(data: np.ndarray, threads: int) -> float:
    """Bytes per second at which ``threads`` threads read ``data`` (uint8 [n], 8-byte aligned), best of a few rounds.

    Raises ToolchainError where no C++ compiler works.
    """
    return max(read_rounds(data, threads, _ROUNDS))


def read_rounds(data: np.ndarray, threads: int, rounds: int) -> list[float]:
    """Bytes per second of each of ``rounds`` readings of ``data`` by ``threads`` threads.

    Raises ToolchainError where no C++ compiler works.
    """
    words = data.nbytes // 8
    repeats = max(1, _ROUND_BYTES // max(data.nbytes, 1))
    sink = np.zeros(1, np.uint64)
    seconds = [_reader()(data.ctypes.data, words, threads, repeats, sink.ctypes.data) for _ in range(rounds)]
    return [words * 8 * repeats / each for each in seconds]


@cache
def _reader() -> ctypes._CFuncPtr:
    read = ctypes.CDLL(str(toolchain.build(_SOURCE))).kogc_read
    read.restype = ctypes.c_double
    read.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int64, ctypes.c_void_p)
    return read
