// A worker is one thread; it computes with vectors of TILE_ROWS floats.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#define DEVICE_MEMBER
#define DEVICE_STAGE DEVICE NOINLINE  // stages stay functions: quick to compile, and a profiler shows their names
#define DEVICE [[maybe_unused]] static
#define NOINLINE __attribute__((noinline))
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#define ROLLED  // the compiler knows better here; on GPUs code must be small
#else
#define UNROLL _Pragma("GCC unroll 32")
#define ROLLED  // the compiler knows better here; on GPUs code must be small
#endif
#ifdef KOGC_PROBE
#define PROBE(statement) statement
#else
#define PROBE(statement)
#endif

// Storage dtypes are types of their own, so that load and store pick the conversion.
struct fp16 { uint16_t bits; };
struct bf16 { uint16_t bits; };
typedef float fp32;

constexpr float NOTHING = -__builtin_inff();  // below every score and logit

DEVICE inline int64_t clock_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}
