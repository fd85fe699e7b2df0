#include "storage/posix/spawn.h"

#include <fcntl.h>
#include <spawn.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>

#include "base/process.h"

namespace tessera {
namespace {

// As exec() wants them.
std::vector<char*> pointers_of(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace

int spawn(pid_t& id, const std::string& program, std::vector<std::string> words,
          const SpawnOptions& options) {
  posix_spawn_file_actions_t files;
  posix_spawnattr_t attributes;
  sigset_t none, all;
  ::sigemptyset(&none);
  ::sigfillset(&all);
  ::posix_spawn_file_actions_init(&files);
  ::posix_spawnattr_init(&attributes);
  for (const int fd : options.null) {
    const int how = fd == STDIN_FILENO ? O_RDONLY : O_WRONLY;
    ::posix_spawn_file_actions_addopen(&files, fd, "/dev/null", how, 0);
  }
  for (const auto& [ours, theirs] : options.descriptors)
    ::posix_spawn_file_actions_adddup2(&files, ours, theirs);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setsigdefault(&attributes, &all);
  const int of_session = options.own_session ? POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSID : 0;
  ::posix_spawnattr_setflags(&attributes,
                             static_cast<std::int16_t>(POSIX_SPAWN_SETSIGMASK | of_session));
  Variables environment = *variables();
  const int failed = ::posix_spawn(&id, program.c_str(), &files, &attributes,
                                   pointers_of(words).data(), pointers_of(environment).data());
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&files);
  return failed;
}

}  // namespace tessera
