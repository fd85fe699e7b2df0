// Children that are forked at random moments while a process loads and saves, and that read from
// the checkpoint which it has open, as the workers of a DataLoader do.
//   forks LOCATION COUNT SEED
// LOCATION: a directory or the URL of one. Each child has to read right values, or get an Error and
// read right values when it asks again; none may hang; and no save of the parent may find a lock
// that a child keeps. Prints a line for each that goes wrong and a summary; exits with 1 when one
// did.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/tensor_view.h"

namespace {

using namespace tessera;
using Random = std::mt19937_64;

constexpr std::int64_t kElements = 2'000'000;
constexpr std::int64_t kMostRead = 300'000;  // elements
constexpr int kSeconds = 30;                 // in which a child is done
constexpr std::size_t kMostChildren = 12;    // at once

enum Status : int { right, wrong_values, only_errors };

std::atomic<int> faults{0};

void complain(const std::string& what) {
  ++faults;
  std::printf("%s\n", what.c_str());
  std::fflush(stdout);
}

std::vector<float> counting(float first) {
  std::vector<float> values(kElements);
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = first + static_cast<float>(i % 100'000);
  return values;
}

SaveOptions overwriting() {
  SaveOptions options;
  options.overwrite = true;
  options.threads = 2;
  return options;
}

void save_numbers(const std::string& where) {
  std::vector<float> a = counting(0), b = counting(1);
  save(Value::dict({{"a", TensorView::of(a.data(), DType::float32, {kElements}).tensor()},
                    {"b", TensorView::of(b.data(), DType::float32, {kElements}).tensor()}}),
       where, overwriting());
}

bool reads_right(const Checkpoint& checkpoint, Random& random) {
  const bool is_a = random() % 2 == 0;
  const auto count = static_cast<std::int64_t>(random() % kMostRead) + 1;
  const auto begin =
      static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(kElements - count));
  std::vector<float> values(static_cast<std::size_t>(count), -1);
  checkpoint.read(is_a ? "a" : "b", Box{{begin}, {count}},
                  TensorView::of(values.data(), DType::float32, {count}));
  for (std::int64_t i = 0; i < count; ++i) {
    const float expected = (is_a ? 0.0F : 1.0F) + static_cast<float>((begin + i) % 100'000);
    if (values[static_cast<std::size_t>(i)] != expected) return false;
  }
  return true;
}

// In a child, which has a second try for what fails.
Status read_in_child(const Checkpoint& open, const std::string& where, Random& random) {
  int failed = 0;
  for (int i = 0; i < 6; ++i) {
    try {
      if (!reads_right(i == 3 ? Checkpoint::open(where) : open, random)) return wrong_values;
    } catch (const Error& error) {
      std::fprintf(stderr, "child: %s\n", error.what());
      ++failed;
    }
  }
  return failed > 3 ? only_errors : right;
}

class Children {
 public:
  void add(pid_t child) {
    running_.push_back(child);
    while (running_.size() > kMostChildren) take(running_.front());
  }
  void take_all() {
    while (!running_.empty()) take(running_.front());
  }

 private:
  void take(pid_t child) {
    running_.pop_front();
    int status = 0;
    if (::waitpid(child, &status, 0) != child) return complain("a child is lost");
    if (WIFSIGNALED(status))
      return complain("a child ended by signal " + std::to_string(WTERMSIG(status)) +
                      (WTERMSIG(status) == SIGALRM ? ": it hung" : ""));
    if (WEXITSTATUS(status) == wrong_values) complain("a child read wrong values");
    if (WEXITSTATUS(status) == only_errors) complain("a child read nothing");
  }

  std::list<pid_t> running_;
};

void read_on(const Checkpoint& open, std::uint64_t seed, const std::stop_token& stop) {
  Random random(seed);
  while (!stop.stop_requested()) {
    try {
      if (!reads_right(open, random)) complain("the parent read wrong values");
    } catch (const Error& error) {
      complain(std::string("the parent: ") + error.what());
    }
  }
}

void save_on(const std::string& where, std::atomic<int>& saves, const std::stop_token& stop) {
  while (!stop.stop_requested()) {
    try {
      save_numbers(where);
      ++saves;
    } catch (const Error& error) {
      complain(std::string("a save: ") + error.what());
    }
  }
}

void fork_on(const Checkpoint& open, const std::string& where, int count, Random& random) {
  Children children;
  for (int i = 0; i < count; ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 30'000));
    const std::uint64_t seed = random();
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(kSeconds);
      Random own(seed);
      const Status status = read_in_child(open, where, own);
      ::usleep(static_cast<useconds_t>(own() % 200'000));  // longer than a save takes
      ::_exit(status);
    }
    children.add(child);
  }
  children.take_all();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const std::string root = argv[1];
  const int count = std::atoi(argv[2]);
  Random random(std::strtoull(argv[3], nullptr, 10));
  save_numbers(root + "/read");
  const Checkpoint open = Checkpoint::open(root + "/read");
  std::atomic<int> saves{0};
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 2; ++i) {
      threads.emplace_back(
          [&open, seed = random()](const std::stop_token& stop) { read_on(open, seed, stop); });
    }
    threads.emplace_back(
        [&](const std::stop_token& stop) { save_on(root + "/saved", saves, stop); });
    fork_on(open, root + "/read", count, random);
  }
  std::printf("%d forks beside %d saves, %d faults\n", count, saves.load(), faults.load());
  return faults == 0 ? 0 : 1;
}
