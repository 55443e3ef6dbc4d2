static void* run_worker(void* argument) {
  Member& member = *(Member*)argument;
  const kogc_launch& launch = launch_of(member);
  Worker w = {};
  w.launch = &launch;
  w.plan = launch.plan;
  w.scratch = member.crew->scratch + (int64_t)member.id * SCRATCH_FLOATS;
  w.id = member.id;
  w.blame = &member.crew->blame;
  lend_sampler(w, *member.crew);
  Cursor stream = {launch.plan + launch.plan[PLAN_STREAMS] + 4 * w.id};
  w.stream.first = launch.stream + stream.next_wide();
  w.stream.last = w.stream.first + stream.next_wide();
  w.stream.next = w.stream.ahead = w.stream.first;
  member.reason = check_in(w, *member.crew) ? run_sequence(w) : FINISH_CANCELLED;
  return nullptr;
}
