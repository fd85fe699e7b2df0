// The same targets without libFuzzer, for every test run:
//
//   sample COUNT FIRST SEED_FILE...
//
// tries inputs FIRST to FIRST + COUNT - 1. Input i is a seed changed by rules that only i
// determines, so a finding is repeated by its number alone. They are tried in a process of its own,
// so a crash has a number, too.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iterator>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "target.h"
#include "tessera/error.h"

namespace {

using Bytes = std::vector<std::byte>;

Bytes read_file(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  Bytes bytes(text.size());
  std::transform(text.begin(), text.end(), bytes.begin(), [](char c) { return std::byte(c); });
  return bytes;
}

class Mutator {
 public:
  explicit Mutator(std::uint64_t number) : random_(number) {}

  Bytes change(const std::vector<Bytes>& seeds) {
    Bytes bytes = seeds[below(seeds.size())];
    for (std::size_t n = 1 + below(4); n > 0 && !bytes.empty(); --n) change_once(bytes, seeds);
    return bytes;
  }

 private:
  std::size_t below(std::size_t limit) { return static_cast<std::size_t>(random_() % limit); }
  std::ptrdiff_t place(const Bytes& bytes) {
    return static_cast<std::ptrdiff_t>(below(bytes.size()));
  }

  void change_once(Bytes& bytes, const std::vector<Bytes>& seeds) {
    // Numbers that lie at the edges of what counts, lengths and opcodes can be.
    static constexpr std::array<unsigned char, 8> kEdges = {0, 1, 0x7f, 0x80, 0xff, 0xfe, '.', '('};
    const std::ptrdiff_t at = place(bytes);
    switch (below(6)) {
      case 0:
        bytes[static_cast<std::size_t>(at)] ^= std::byte(1U << below(8));
        break;
      case 1:
        bytes[static_cast<std::size_t>(at)] = std::byte{kEdges[below(kEdges.size())]};
        break;
      case 2: {  // a whole little-endian number
        const std::size_t end =
            std::min(bytes.size(), static_cast<std::size_t>(at) + (1U << below(4)));
        const std::byte value{kEdges[below(kEdges.size())]};
        std::fill(bytes.begin() + at, bytes.begin() + static_cast<std::ptrdiff_t>(end), value);
        break;
      }
      case 3:
        bytes.resize(static_cast<std::size_t>(at));
        break;
      case 4:
        bytes.erase(bytes.begin() + at,
                    bytes.begin() +
                        std::min<std::ptrdiff_t>(at + 1 + static_cast<std::ptrdiff_t>(below(16)),
                                                 std::ssize(bytes)));
        break;
      default: {  // a stretch of another seed
        const Bytes& other = seeds[below(seeds.size())];
        if (other.empty()) break;
        const std::ptrdiff_t from = place(other);
        const auto count = std::min<std::ptrdiff_t>(1 + static_cast<std::ptrdiff_t>(below(32)),
                                                    std::ssize(other) - from);
        bytes.insert(bytes.begin() + at, other.begin() + from, other.begin() + from + count);
      }
    }
  }

  std::mt19937_64 random_;
};

constexpr unsigned kSeconds = 120;  // an input that takes longer has no end

// Tries the inputs, of which `at` is always the present one; the exit code of the process.
int try_all(std::uint64_t count, std::uint64_t first, const std::vector<Bytes>& seeds,
            std::atomic<std::uint64_t>& at) {
  std::uint64_t refused = 0;
  for (at = first; at < first + count; ++at) {
    ::alarm(kSeconds);
    try {
      tessera::fuzz::parse(Mutator(at).change(seeds));
    } catch (const tessera::Error&) {
      ++refused;
    } catch (const std::exception& finding) {
      std::fprintf(stderr, "input %llu: %s\n", static_cast<unsigned long long>(at.load()),
                   finding.what());
      return 1;
    }
  }
  std::printf("%llu inputs, %llu refused\n", static_cast<unsigned long long>(count),
              static_cast<unsigned long long>(refused));
  // Nothing but refusals, or nothing refused: then the seeds or the rules are not what they should
  // be.
  return refused > 0 && refused < count ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  const std::uint64_t count = std::strtoull(argv[1], nullptr, 10);
  const std::uint64_t first = std::strtoull(argv[2], nullptr, 10);
  std::vector<Bytes> seeds;
  std::transform(argv + 3, argv + argc, std::back_inserter(seeds), read_file);
  void* const shared = ::mmap(nullptr, sizeof(std::atomic<std::uint64_t>), PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 2;
  auto& at = *new (shared) std::atomic<std::uint64_t>(first);
  const pid_t child = ::fork();
  if (child == 0) {
    const int code = try_all(count, first, seeds, at);
    std::exit(code);  // NOLINT(concurrency-mt-unsafe): its threads have ended
  }
  int status = 0;
  if (child < 0 || ::waitpid(child, &status, 0) != child) return 2;
  if (WIFEXITED(status)) return WEXITSTATUS(status);
  std::fprintf(stderr, "input %llu: ended by signal %d%s\n",
               static_cast<unsigned long long>(at.load()), WTERMSIG(status),
               WTERMSIG(status) == SIGALRM ? ": it had no end" : "");
  return 1;
}
