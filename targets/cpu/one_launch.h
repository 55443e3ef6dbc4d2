// All workers follow one launch.
static const kogc_launch& launch_of(const Member& member) { return *member.crew->launch; }
