// Exchange between ranks. Each has its own copy of every exchange buffer, and reads no other. A write that other ranks read is
// put into the copies of all of them when it is made: first the values, then the writer's flag beside them, as in its own copy
// (see exchange.h). So a reader finds what it waits for in its own memory, and a value with layers of time to arrive is there
// already when it is wanted.
struct SentRow {  // rows of a vector, in the copies of ``ranks`` (bit r: rank r)
  uint8_t* const* peers;
  uint32_t ranks;
  int64_t begin;  // bytes from an exchange's begin
  SentRow operator+(int rows) const { return {peers, ranks, begin + rows * (int64_t)sizeof(float)}; }
  float* in(int rank) const { return (float*)(peers[rank] + begin); }
};

// A write under way to several ranks, and its index.
struct Sending {
  SentRow slot;
  int lanes, pitch;
  int64_t index;
  SentRow at(int t, int lane) const { return slot + (t * lanes + lane) * pitch; }
};

template <class Each>
DEVICE inline void for_ranks(uint32_t ranks, Each each) {
  for (int rank = 0; rank < RANKS; ++rank)
    if (ranks >> rank & 1) each(rank);
}

// Begin a write that ``readers`` read besides the worker's own rank.
DEVICE inline Sending sending(const Worker& w, const Buffer& buffer, int write, Place, int readers) {
  const int64_t index = write_index(w, buffer, write);
  const int64_t slot = index % buffer.slots * MAX_COLUMNS * buffer.lanes * buffer.pitch * sizeof(float);
  return {{w.launch->peers, (uint32_t)readers | 1u << w.launch->rank, buffer.data + slot}, buffer.lanes, buffer.pitch, index};
}

template <class Rows>
DEVICE inline void store_rows(SentRow to, int unit, int tile, vec v) {
  for_ranks(to.ranks, [&](int rank) { store_rows<Rows>(to.in(rank), unit, tile, v); });
}

DEVICE inline void copy_rows(const Worker& w, SentRow to, const float* from, int first, int last) {
  for_ranks(to.ranks, [&](int rank) { copy_rows(w, to.in(rank), from, first, last); });
}

DEVICE inline void publish(Worker& w, const Buffer& buffer, const Sending& made, Place place) {
  const int fault = fault_at(w, place);
  if (fault == FAULT_DROPPED_PUBLISH) return;
  for_ranks(made.slot.ranks, [&](int rank) {
    if (fault == FAULT_DROPPED_SEND && rank != w.launch->rank) return;
    int64_t* flag = (int64_t*)(made.slot.peers[rank] + buffer.flags + w.id * 64);
    __atomic_store_n(flag, made.index + (fault == FAULT_WRONG_SLOT ? 0 : 1), __ATOMIC_RELEASE);
  });
}

template <int T>
DEVICE inline void publish_best(Worker& w, const Buffer& buffer, const Sending& made, Place place) {
  for (int t = 0; t < T; ++t) for_ranks(made.slot.ranks, [&](int rank) { *(Best*)made.at(t, w.id).in(rank) = w.best[t]; });
  publish(w, buffer, made, place);
}
