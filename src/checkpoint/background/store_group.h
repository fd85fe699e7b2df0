// A Group of processes that have nothing in common but a directory of a store.
#pragma once

#include <chrono>
#include <memory>

#include "tessera/comm.h"
#include "tessera/storage.h"

namespace tessera {

// Messages are small objects of `meeting`, which is new and of this group alone; they travel along
// the tree of comm/tree_links.h. Every rank changes an object a few times in `silence`: one that
// does not come, or gives no such sign, for so long while somebody waits for it is `peer_failed` on
// all ranks. A rank that never comes counts from the moment at which somebody first waits for it.
//
// What the ranks wrote stays until end_meeting(): the last of them has to hear the last message.
// Its maker is no idle thread: signs of life are given by threads that have its priority.
[[nodiscard]] std::unique_ptr<Group> make_store_group(std::shared_ptr<Store> meeting, int rank,
                                                      int size, std::chrono::milliseconds silence);
// Whether a rank has made its group there.
[[nodiscard]] bool has_met(const Store& meeting) noexcept;
// Waits, on rank 0, until all ranks have said that they need the meeting no more, or are lost, and
// removes what is there. On other ranks: says that. Throws nothing: what is left, gc removes.
void end_meeting(std::unique_ptr<Group> group) noexcept;

}  // namespace tessera
