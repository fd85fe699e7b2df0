// Work of many seconds that all ranks do at once, each its own part.
#pragma once

#include <functional>
#include <stop_token>
#include <string>

#include "comm/confer.h"
#include "tessera/comm.h"

namespace tessera {

// As agree() does, for work that takes long: a failure of one rank, or a request on its `stop`,
// ends the work of all within a second, and ranks that are done wait for slower ones however long
// these take. `work` is given the token to watch and throws when that is requested. If the group
// carries no interrupts, `work` runs on a thread of its own, and the calling thread tells the other
// ranks a few times a second that this one goes on. Collective.
void agree_on_long_work(Group& group, const std::string& operation, const std::stop_token& stop,
                        const std::function<void(const std::stop_token&)>& work);

// A conference after such work; in a group that carries interrupts it is one fold for both.
Bytes confer_after_long_work(Group& group, const std::stop_token& stop,
                             const std::function<void(const std::stop_token&)>& work,
                             const std::string& operation, const Conference& conference);

// This rank's part of such work, in a group that carries interrupts: a failure of `work` interrupts
// the other ranks. Returns early when a peer has failed: the next fold has to tell why. Not
// collective.
void work_interruptibly(Group& group, const std::stop_token& stop,
                        const std::function<void(const std::stop_token&)>& work);

}  // namespace tessera
