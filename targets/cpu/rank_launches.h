// Launches of all ranks lie one behind the other; workers are numbered through them.
static const kogc_launch& launch_of(const Member& member) { return member.crew->launch[member.id / (WORKERS / RANKS)]; }
