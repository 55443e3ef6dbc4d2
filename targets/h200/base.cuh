// A worker is one thread block. Eight of its warps compute (consumers), lanes of others keep the weights coming (producers) and tell
// what has come (relay). Consumers run the same code on the same decisions; a vec is one row per thread.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#define DEVICE [[maybe_unused]] static __device__ __forceinline__
#define DEVICE_ONCE [[maybe_unused]] static __device__ __noinline__  // one copy: the kernel should stay in the instruction cache
#define DEVICE_MEMBER __device__ __forceinline__
#define DEVICE_STAGE DEVICE_ONCE
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#ifdef KOGC_PROBE
#define PROBE(statement) statement
#else
#define PROBE(statement)
#endif

typedef __half fp16;
typedef __nv_bfloat16 bf16;
typedef float fp32;
typedef float vec;  // one row of a tile

#define NOTHING __int_as_float(0xff800000)  // −∞: below every score and logit

DEVICE float widen(fp16 x) { return __half2float(x); }
DEVICE float widen(bf16 x) { return __bfloat162float(x); }
DEVICE float widen(float x) { return x; }
DEVICE void narrow(fp16* to, float x) { *to = __float2half_rn(x); }
DEVICE void narrow(bf16* to, float x) { *to = __float2bfloat16_rn(x); }
DEVICE void narrow(float* to, float x) { *to = x; }

DEVICE float broadcast(float x) { return x; }
template <int WIDTH>
DEVICE float load_at(const float* p, int i) { return p[i]; }
template <int WIDTH>
DEVICE void store_at(float* p, int i, float x) { p[i] = x; }
