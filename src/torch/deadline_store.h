// Stores whose calls end.
//
// c10d::TCPStore reads an answer without a time limit: while the process that serves it is stopped,
// or the network is cut, whoever calls it waits for ever. And no thread can be made to leave such a
// call. So a thread of the store's own makes the calls, whoever called waits until the deadline,
// and a thread that hangs is left behind.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <string>

namespace tessera {

// The store that `open` returns, which is called as the store is, by the thread of its own. A call
// may take as long as the timeout of this store, `timeout` until setTimeout() changes it; a wait as
// long as it says, and a second for the store to say that it has ended. Then it throws
// DistNetworkError, whose text says that the store at `address` timed out; so does each later call,
// at once, until the one that hangs has had its answer. Errors of the connection name `address`.
// Any thread may call it, one is served at a time. In a child of fork() calls throw
// `invalid_argument`, and its end touches nothing. A timeout of zero is none.
[[nodiscard]] c10::intrusive_ptr<c10d::Store> open_with_deadline(
    std::string address, std::chrono::milliseconds timeout,
    std::function<c10::intrusive_ptr<c10d::Store>()> open);

// `store` with this deadline, if it is a TCPStore or a part of one. Others are returned as they
// are: one made by the function above has its deadline, and those of a program may be bound to its
// threads.
[[nodiscard]] c10::intrusive_ptr<c10d::Store> with_deadline(
    const c10::intrusive_ptr<c10d::Store>& store, std::chrono::milliseconds deadline);

}  // namespace tessera
