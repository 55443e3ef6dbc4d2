// A block of the h200 made of threads of the host, around attention_by_value.cuh: 256 threads that meet where the block's do. The
// ring holds all chunks side by side. `STORAGE`, `CASES` and the two sections of device code come from test_h200_attention.py.
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#define DEVICE [[maybe_unused]] static inline
#define DEVICE_MEMBER inline
#define UNROLL
#define ROLLED
#define __expf std::exp

typedef _Float16 fp16;
typedef float fp32;
typedef STORAGE storage;
constexpr int CONSUMER_WARPS = 8, CONSUMERS = 32 * CONSUMER_WARPS, CHUNK_BYTES = 16384, BATCH_UNITS = 32, TILE_ROWS = 4, MAX_COLUMNS = 1;
constexpr int RING_BEGIN = 0;
const float NOTHING = -INFINITY;

struct Thread { int x; };
thread_local Thread threadIdx;
struct Meeting : std::barrier<> { Meeting() : std::barrier<>(32) {} };
static Meeting warps[CONSUMER_WARPS];
static std::barrier<> everybody(CONSUMERS);
static float said[CONSUMERS];

static void __syncwarp() { warps[threadIdx.x / 32].arrive_and_wait(); }
static float __shfl_xor_sync(unsigned, float mine, int lanes) {
  said[threadIdx.x] = mine;
  __syncwarp();
  const float found = said[threadIdx.x ^ lanes];
  __syncwarp();
  return found;
}
static float widen(storage x) { return x; }

struct Worker { int thread, position[1]; };
static void worker_sync(const Worker&) { everybody.arrive_and_wait(); }
struct Shared { float dots[2][CONSUMER_WARPS][BATCH_UNITS * 2 * TILE_ROWS * MAX_COLUMNS]; } shared;
static Shared& shared_state() { return shared; }
alignas(1024) static uint8_t shared_memory[1 << 22];

struct Stream { uint32_t unit; };
static Stream open_stream() { return {0}; }
static void next_chunk(Stream&) {}
static void land(Stream&, int) {}
static void release(Stream&, int) {}
static void next_unit(Stream& s, int bytes) { s.unit += bytes; }
static void close_stream(Stream&) {}

struct AttentionSpan { int first, last, window; };
static int cached_positions(AttentionSpan span, int position) {
  const int end = span.last < position ? span.last : position;
  return end > span.first ? end - span.first : 0;
}
constexpr int chunk_positions(int row_bytes) {
  const int fit = CHUNK_BYTES / 2 / row_bytes;
  return fit < 16 ? fit : fit / 16 * 16;
}

// Where results go, and how often each was written.
static float* results;
static int writes[1 << 14];
struct Row {
  float* words;
  Row operator+(int rows) const { return {words + rows}; }
  void put(int row, float value) const {
    words[row] = value;
    __atomic_fetch_add(&writes[words + row - results], 1, __ATOMIC_RELAXED);
  }
};

/*DEVICE CODE*/

typedef std::vector<float> Vector;

static Vector drawn(std::mt19937& source, int count) {
  std::normal_distribution<float> normal;
  Vector values(count);
  for (float& value : values) value = normal(source);
  return values;
}

// The key or value ``values`` of a position into a cache row, and what the row then holds.
template <int HEAD_DIM>
static Vector stored(storage* row, const Vector& values, int position) {
  Vector rounded;
  for (int i = 0; i < HEAD_DIM; ++i) {
    storage& at = row[CacheRow<HEAD_DIM>::value(i, position)];
    at = (storage)values[i];
    rounded.push_back(at);
  }
  return rounded;
}

// The largest error of the results for positions ``first`` to ``last`` seen from ``now``; infinite unless each was written once.
template <int GROUP, int HEAD_DIM>
static double error(int first, int last, int now, float softcap) {
  constexpr int ROW = CacheRow<HEAD_DIM>::BYTES / sizeof(storage), MOST = chunk_positions(CacheRow<HEAD_DIM>::BYTES), PART = HEAD_DIM + 2;
  std::mt19937 source(GROUP * 1000 + HEAD_DIM);
  const Vector q = drawn(source, GROUP * HEAD_DIM), key = drawn(source, HEAD_DIM), value = drawn(source, HEAD_DIM);
  const AttentionSpan span = {first, last, 0};
  std::vector<Vector> keys, values;
  for (int i = 0; i < cached_positions(span, now); ++i) {
    storage* at = (storage*)(shared_memory + i / MOST * CHUNK_BYTES) + i % MOST * ROW;
    keys.push_back(stored<HEAD_DIM>(at, drawn(source, HEAD_DIM), first + i));
    values.push_back(stored<HEAD_DIM>(at + MOST * ROW, drawn(source, HEAD_DIM), first + i));
  }
  if (first <= now && now < last) keys.push_back(key), values.push_back(value);

  Vector out(GROUP * PART);
  results = out.data();
  memset(writes, 0, sizeof writes);
  const float scale = 1 / std::sqrt((float)HEAD_DIM);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < CONSUMERS; ++thread)
    threads.emplace_back([&, thread] {
      threadIdx.x = thread;
      Worker w = {thread, {now}};
      attend_by_value<GROUP, HEAD_DIM>(w, q.data(), key.data(), value.data(), span, scale, softcap, Row{out.data()}, PART);
    });
  for (std::thread& thread : threads) thread.join();

  double worst = 0;
  for (int i = 0; i < GROUP * PART; ++i)
    if (writes[i] != 1) return INFINITY;
  for (int c = 0; c < GROUP; ++c) {
    std::vector<double> scores, sums(HEAD_DIM);
    double top = -INFINITY, total = 0;
    for (const Vector& one : keys) {
      double score = 0;
      for (int i = 0; i < HEAD_DIM; ++i) score += (double)q[c * HEAD_DIM + i] * one[i];
      score *= scale;
      scores.push_back(softcap > 0 ? softcap * std::tanh(score / softcap) : score);
      top = std::fmax(top, scores.back());
    }
    for (size_t p = 0; p < keys.size(); ++p) {
      const double weight = std::exp(scores[p] - top);
      total += weight;
      for (int i = 0; i < HEAD_DIM; ++i) sums[i] += weight * values[p][i];
    }
    const float* found = &out[c * PART];
    worst = std::fmax(worst, std::fmax(std::fabs(found[HEAD_DIM] - top), std::fabs(found[HEAD_DIM + 1] - total) / total));
    for (int i = 0; i < HEAD_DIM; ++i) worst = std::fmax(worst, std::fabs(found[i] - sums[i]) / total);
  }
  return worst;
}

int main() {
  for (double one : {CASES}) printf("%g\n", one);
}
