// A Group whose ranks talk along a tree (comm/tree_links.h): a rank has a connection to its parent
// and to at most 32 children, however many ranks there are.
//
// Every connection carries signs of life from threads of its own, also while a rank calls nothing.
// So a rank that works is told from one that is lost: a collective waits for the former up to a
// limit, and ends soon after the latter falls silent. Calls of two threads at once get `conflict`.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "comm/edge.h"
#include "comm/tree_links.h"
#include "tessera/comm.h"

namespace tessera {

// The connection to a neighbour; null: it has not come yet, ask again.
using Connect = std::function<std::unique_ptr<Wire>(int peer)>;

// Returns when all ranks are connected. Throws `timeout` or `peer_failed` naming a rank that does
// not come within the deadline. Collective.
[[nodiscard]] std::unique_ptr<Group> make_tree_group(int rank, int size, const TreeOptions& options,
                                                     std::chrono::milliseconds deadline,
                                                     const Connect& connect);

}  // namespace tessera
