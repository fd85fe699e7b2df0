// What a writer process keeps in memory, for processes of other hosts: a server beside what is
// kept, a reader of it, and a copy of a part in this process's memory.
//
// Addresses hold a token, and who has it may read. It travels as it is: whoever can listen on the
// network reads it, and the bytes, too. peer_wire.h has the frames.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>

#include "base/process.h"
#include "storage/arena/arenas.h"
#include "tessera/io.h"

namespace tessera {

inline constexpr std::chrono::milliseconds kPeerSilence{60'000};

// Where a server listens, and what it wants to hear first of all.
struct PeerAddress {
  std::string host;        // a number of IPv4 or IPv6
  std::uint16_t port = 0;  // never 0 of a server
  std::string token;       // 64 lower-case hex digits

  [[nodiscard]] bool operator==(const PeerAddress&) const = default;
};
// One line with two blanks. It holds the token: do not show it.
[[nodiscard]] std::string to_text(const PeerAddress& address);
// Throws `corrupt` for a text that to_text did not make.
[[nodiscard]] PeerAddress peer_address_from_text(const std::string& text);

struct ArenaServerOptions {
  // For so long a connection may say nothing and take nothing. The reader's should be the same.
  std::chrono::milliseconds silence = kPeerSilence;
  // Each has a thread. More wait until one of them ends.
  std::size_t most_connections = 1024;
};

// Lets peers read one part at a time. It listens on the interface that TESSERA_ARENA_IFNAME names,
// else GLOO_SOCKET_IFNAME, else on the address that this host's name has, else on loopback. All
// members may be called from any thread.
class ArenaServer {
 public:
  // Throws `not_found` for an interface that is not there or has no address for others, and `io`.
  explicit ArenaServer(const ArenaServerOptions& options = {});
  // Ends all connections, and waits for no reader.
  ~ArenaServer();
  ArenaServer(const ArenaServer&) = delete;
  ArenaServer& operator=(const ArenaServer&) = delete;

  [[nodiscard]] const PeerAddress& address() const noexcept;
  // "eth0 (GLOO_SOCKET_IFNAME)": where it listens and why, for the log.
  [[nodiscard]] const std::string& interface() const noexcept;

  // What may be read from now on, in the place of what was. The objects are descriptors of this
  // process, which it may close later. Who reads what was there before is told that it is gone; an
  // answer that is under way goes on, so that its bytes may be those of what the memory has next.
  // Neither call waits for a reader. Throws `unsupported` for a part whose names peers do not take,
  // and `io`.
  void serve(const KeptPart& part);
  void serve_nothing() noexcept;

 private:
  class Impl;
  MadeHere made_here_;
  std::unique_ptr<Impl> impl_;
};

class PeerLanes;

// Reads what a server of another process, mostly of another host, serves. All members may be called
// from several threads at once. Every call throws `peer_failed`, with the host and port, when the
// server has gone or says nothing for `silence`, `corrupt` for bytes that are no frame of a server,
// `unsafe` when the server does not know the token, and `cancelled` when asked to stop, also by
// HeedStop. Behind an error a later call tries again with a new connection.
class RemoteArena {
 public:
  explicit RemoteArena(const PeerAddress& address, std::chrono::milliseconds silence = kPeerSilence,
                       const std::stop_token& stop = {});

  // The part that is served, as soon as it is another than that of `writer` and `number`: ("", 0)
  // for any. Its objects are descriptors of the server's process. None: asked to stop.
  [[nodiscard]] std::optional<KeptPart> next_part(const std::string& writer, std::uint64_t number,
                                                  const std::stop_token& stop = {}) const;
  // An object of that part. It may outlive this. Reads throw `not_found` once the part is served no
  // more. Bytes that were read while that happened may be those of another save: whoever reads
  // compares digests. Throws `not_found` if the part has no such object.
  [[nodiscard]] std::shared_ptr<ByteSource> open(const KeptPart& part,
                                                 const std::string& name) const;
  // Throws `not_found` when that part is served no more.
  void require_served(const KeptPart& part, const std::stop_token& stop = {}) const;

  // "10.0.0.3:4321"
  [[nodiscard]] const std::string& name() const noexcept;

 private:
  std::shared_ptr<PeerLanes> lanes_;  // the sources use it, too
};

struct CopyOutcome {
  std::uint64_t bytes = 0;
  double seconds = 0;
};

// A copy of a peer's part in memory of this process, or none. It holds the memory for the next copy
// and frees it in the end. One thread at a time.
class CopiedPart {
 public:
  // As a KeptNotice of this process says it. None: nothing was copied, or the last copy failed.
  [[nodiscard]] const std::optional<KeptPart>& part() const noexcept { return part_; }

 private:
  friend CopyOutcome copy_part(const RemoteArena& from, const KeptPart& part, CopiedPart& into,
                               const std::stop_token& stop);
  struct Memory {
    Fd tree, arena, digests;
  };
  Memory memory_;
  std::uint64_t arena_bytes_ = 0;  // that memory_.arena is for; a count is behind them (arenas.h)
  std::optional<KeptPart> part_;
};

// Copies all objects of a part that `from` serves, over what `into` has: nobody may be told of that
// any more. Tree and blocks are compared with the digests (checkpoint/open/open_arena.cpp). Throws
// `not_found` if another part is served meanwhile, `corrupt` for bytes that differ from the
// digests, which a trainer that stages its next save causes, too, `io` and `out_of_space` for
// memory that this process does not get, and what RemoteArena throws. `into` has no part then.
CopyOutcome copy_part(const RemoteArena& from, const KeptPart& part, CopiedPart& into,
                      const std::stop_token& stop = {});

}  // namespace tessera
