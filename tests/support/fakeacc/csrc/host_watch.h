// Watches what operators on the host do to pinned memory.
#pragma once

namespace fakeacc {

// Reports, while it is on, every operator of any thread that touches pinned memory on the host
// although a queued task that the host has not waited for uses it. Access by other means (numpy,
// a raw pointer) stays unseen.
void set_host_watch(bool on);

} // namespace fakeacc
