// Damages checkpoints at random places and counts what readers make of it:
//
//   corruption GOLDEN COUNT SEED [CHECKPOINT_OF_PYTORCH...]
//
// COUNT times for checkpoints that PyTorch wrote and COUNT times for our own. Exit 1 when a reader
// gets wrong values from ours, when `verify` passes damage to ours, when more than one in a
// thousand of PyTorch's gives wrong values, or when anything clean is refused.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <random>

#include "subjects.h"
#include "tessera/error.h"
#include "tessera/verify.h"

namespace tessera::corruption {
namespace {

enum class Damage { flip, burst, zero_page, truncate, swap, older };
constexpr std::array kNames = {"flip",     "burst",         "zero page",
                               "truncate", "swapped files", "older file"};

struct Count {
  std::uint64_t trials = 0;
  std::uint64_t nothing = 0;  // the damage happened to change no byte
  std::uint64_t refused = 0;  // by the reader
  std::uint64_t right = 0;    // read, and everything is as before
  std::uint64_t silent = 0;   // read, and something differs
  std::uint64_t passed = 0;   // changed, but `verify` has no finding
};

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::uint64_t below(std::uint64_t limit) { return engine_() % limit; }

 private:
  std::mt19937_64 engine_;
};

// One place in all extents, each byte as likely as any other.
Extent place_in(const Subject& subject, Random& random) {
  std::uint64_t total = 0;
  for (const Extent& extent : subject.extents) total += extent.end - extent.begin;
  std::uint64_t at = random.below(total);
  for (const Extent& extent : subject.extents) {
    const std::uint64_t size = extent.end - extent.begin;
    if (at < size) return {extent.file, extent.begin + at, extent.end};
    at -= size;
  }
  return {};
}

std::shared_ptr<const Bytes> damaged(const Bytes& clean, const Extent& place, Damage damage,
                                     Random& random) {
  auto bytes = std::make_shared<Bytes>(clean);
  const auto at = bytes->begin() + static_cast<std::ptrdiff_t>(place.begin);
  const auto left = static_cast<std::ptrdiff_t>(place.end - place.begin);
  if (damage == Damage::flip) {
    *at ^= std::byte(1U << random.below(8));
  } else if (damage == Damage::burst) {
    const auto size =
        std::min<std::ptrdiff_t>(left, 2 + static_cast<std::ptrdiff_t>(random.below(63)));
    std::generate(at, at + size, [&random] { return std::byte(random.below(256)); });
  } else if (damage == Damage::zero_page) {
    const auto rest = static_cast<std::ptrdiff_t>(4096 - place.begin % 4096);
    std::fill(at, at + std::min(left, rest), std::byte{0});
  } else {
    bytes->resize(static_cast<std::size_t>(place.begin));
  }
  return bytes;
}

// Damages one file, or moves files about.
Files harm(const Subject& subject, Damage damage, Random& random) {
  Files files = subject.files;
  if (damage == Damage::older) {
    auto old = subject.older.begin();
    std::advance(old, static_cast<std::ptrdiff_t>(random.below(subject.older.size())));
    files[old->first] = old->second;
  } else if (damage == Damage::swap) {
    auto first = files.begin();
    auto second = files.begin();
    std::advance(first, static_cast<std::ptrdiff_t>(random.below(files.size())));
    std::advance(second, static_cast<std::ptrdiff_t>(random.below(files.size())));
    std::swap(first->second, second->second);
  } else {
    const Extent place = place_in(subject, random);
    files[place.file] = damaged(*subject.files.at(place.file), place, damage, random);
  }
  return files;
}

bool same_bytes(const Files& a, const Files& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.first == y.first && (x.second == y.second || *x.second == *y.second);
  });
}

bool verifies(const Subject& subject, const Files& files) {
  try {
    return verify(open(subject, files), {.threads = 1}).findings.empty();
  } catch (const Error&) {
    return false;
  }
}

// Returns whether this trial is as it must be; a .pt has a CRC-32 of each tensor only.
bool one_trial(const Subject& subject, Damage damage, Random& random, Count& count) {
  const Files files = harm(subject, damage, random);
  const bool changed = !same_bytes(files, subject.files);
  ++count.trials;
  bool wrong = false;
  bool read = false;
  try {
    wrong = content_of(open(subject, files)) != subject.content;
    read = true;
  } catch (const Error&) {
    ++count.refused;
  }
  if (wrong) ++count.silent;
  if (read && !wrong) ++count.right;
  const bool passed = verifies(subject, files);
  if (changed && passed) ++count.passed;
  if (changed) return !wrong && (!subject.ours || !passed);
  ++count.nothing;
  return read && !wrong && passed;
}

// COUNT trials over all subjects; returns how many were not as they must be.
std::uint64_t run(const char* title, const std::vector<Subject>& subjects, std::uint64_t count,
                  Random& random) {
  std::array<Count, kNames.size()> counts;
  std::uint64_t bad = 0;
  for (const Subject& subject : subjects) {
    if (!verifies(subject, subject.files)) {
      std::printf("false alarm: %s is clean\n", subject.name.c_str());
      ++bad;
    }
  }
  for (std::uint64_t i = 0; i < count; ++i) {
    const Subject& subject = subjects[random.below(subjects.size())];
    const auto kinds = subject.older.empty() ? 4 : kNames.size();
    const auto damage = static_cast<Damage>(random.below(kinds));
    if (one_trial(subject, damage, random, counts[static_cast<std::size_t>(damage)])) continue;
    ++bad;
    std::printf("%s: %s in trial %llu\n", subject.name.c_str(),
                kNames[static_cast<std::size_t>(damage)], static_cast<unsigned long long>(i));
  }
  std::printf("%s\n%-14s %8s %8s %8s %8s %8s %8s\n", title, "", "trials", "refused", "right",
              "silent", "passed", "no-op");
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    const Count& row = counts[i];
    const auto n = [](std::uint64_t number) { return static_cast<unsigned long long>(number); };
    if (row.trials == 0) continue;
    std::printf("%-14s %8llu %8llu %8llu %8llu %8llu %8llu\n", kNames[i], n(row.trials),
                n(row.refused), n(row.right), n(row.silent), n(row.passed), n(row.nothing));
  }
  return bad;
}

}  // namespace
}  // namespace tessera::corruption

int main(int argc, char** argv) {
  using namespace tessera::corruption;  // NOLINT(google-build-using-namespace)
  if (argc < 4) return 2;
  const std::uint64_t count = std::strtoull(argv[2], nullptr, 10);
  Random random(std::strtoull(argv[3], nullptr, 10));
  std::string scratch = (std::filesystem::temp_directory_path() / "tessera-XXXXXX").string();
  if (mkdtemp(scratch.data()) == nullptr) return 2;
  int code = 0;
  try {
    const std::uint64_t theirs = run(
        "written by PyTorch", pytorch_subjects(argv[1], {argv + 4, argv + argc}), count, random);
    const std::uint64_t ours = run("written by Tessera", our_subjects(scratch), count, random);
    code = ours > 0 || theirs * 1000 > count ? 1 : 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    code = 1;
  }
  std::filesystem::remove_all(scratch);
  return code;
}
