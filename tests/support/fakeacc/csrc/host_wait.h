// Waits of host threads. Every one of them goes through here.
#pragma once

#include "stream.h"

#include <cstdint>

namespace fakeacc {

// Blocks the calling host thread until `entry` tasks of the stream are done. The GIL is let go of
// meanwhile: some of torch's bindings wait with it held, and the thread that would queue, or hold
// back, the awaited task may be a Python thread. Throws after a minute with what is in the way.
void wait_on_host(Stream& stream, uint64_t entry);

} // namespace fakeacc
