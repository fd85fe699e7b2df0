// Savers and readers of one place of an object store, many times.
//   store_races races URL COUNT    two savers: one of them wins, and its checkpoint is whole
//   store_races loads URL COUNT    loads, and as many openings, while a saver replaces what is
//                                  there: none is of two checkpoints, and one of a hundred at
//                                  most is refused
//   store_races stops URL COUNT    conversions and saves that are stopped anywhere: they leave
//   nothing,
//                                  or a whole checkpoint
//   store_races saves URL COUNT    saves one behind the other, each read back
// Prints a line for each that goes wrong and a summary; exits with 1 when one did, of saves when
// more than one of a thousand failed. Savers are threads with memory of their own.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/convert.h"
#include "tessera/error.h"
#include "tessera/storage.h"
#include "tessera/tensor_view.h"

namespace {

using namespace tessera;

constexpr std::int64_t kElements = 5000;

// All elements are the number.
struct Numbered {
  explicit Numbered(int number)
      : a(kElements, static_cast<float>(number)), b(kElements, static_cast<float>(number)) {
    tree = Value::dict({{"a", TensorView::of(a.data(), DType::float32, {kElements}).tensor()},
                        {"b", TensorView::of(b.data(), DType::float32, {kElements}).tensor()},
                        {"n", number}});
  }

  // Its number; -1: elements are of several.
  [[nodiscard]] int number() const {
    const auto n = static_cast<int>(tree.at("n").as_int());
    for (const auto* elements : {&a, &b})
      for (const float element : *elements)
        if (element != static_cast<float>(n)) return -1;
    return n;
  }

  std::vector<float> a, b;
  Value tree;
};

int loaded_number(const std::string& url) {
  Numbered memory(-2);
  load(memory.tree, url);
  return memory.number();
}

int wrong = 0;

void complain(int round, const std::string& what) {
  ++wrong;
  std::printf("round %d: %s\n", round, what.c_str());
  std::fflush(stdout);
}

// None: it has won.
std::string lost_with(const std::string& url, int number, bool overwrite) {
  SaveOptions options;
  options.overwrite = overwrite;
  options.threads = 1;
  const Numbered saved(number);
  try {
    save(saved.tree, url, options);
    return "";
  } catch (const Error& error) {
    const bool is_known =
        error.code() == ErrorCode::already_exists || error.code() == ErrorCode::conflict;
    return (is_known ? "" : "not as a rival: ") + std::string(error.what());
  }
}

// In turns the place is empty, or has a checkpoint that both replace.
void race(const std::string& url, int round) {
  const bool overwrite = round % 2 == 0;
  const auto store = open_store(url);
  if (!overwrite)
    for (const ObjectInfo& object : store->list()) store->remove(object.name);
  std::string lost[2];
  {
    std::atomic<int> ready{0};
    std::vector<std::jthread> savers;
    for (int i = 0; i < 2; ++i) {
      savers.emplace_back([&, i] {
        ++ready;
        while (ready < 2) std::this_thread::yield();
        lost[i] = lost_with(url, 2 * round + i, overwrite);
      });
    }
  }
  for (const std::string& error : lost)
    if (error.starts_with("not as a rival")) return complain(round, error);
  const int there = loaded_number(url);
  // One of two that replace may begin when the other one is done: then both have won, the later one
  // last.
  if (lost[0].empty() && lost[1].empty() && !overwrite) return complain(round, "two winners");
  if (!lost[0].empty() && !lost[1].empty())
    return complain(round, "no winner: " + lost[0] + "; " + lost[1]);
  if (there != 2 * round && there != 2 * round + 1)
    return complain(round, "what is there is " + std::to_string(there));
  if (!lost[there - 2 * round].empty()) complain(round, "what is there has lost");
}

void load_while_replaced(const std::string& url, int rounds) {
  std::atomic<bool> is_over{false};
  std::atomic<int> saved{0};
  (void)lost_with(url, 0, true);
  std::jthread saver([&] {
    for (int number = 1; !is_over; ++number) {
      const std::string lost = lost_with(url, number, true);
      if (!lost.empty()) complain(number, "a save alone failed: " + lost);
      saved = number;
    }
  });
  int refused = 0;
  for (int round = 0; round < rounds; ++round) {
    const int before = saved;
    try {
      const int number = loaded_number(url);
      if (number < before) complain(round, "loaded " + std::to_string(number));
    } catch (const Error& error) {
      ++refused;
      if (error.code() != ErrorCode::conflict && error.code() != ErrorCode::not_found)
        complain(round, error.what());
    }
  }
  is_over = true;
  saver.join();
  // A load begins anew where its checkpoint is replaced.
  if (refused * 100 > rounds) complain(rounds, std::to_string(refused) + " loads were refused");
  std::printf("%d loads during %d replaces, %d of them refused\n", rounds, saved.load(), refused);
}

void save_in_turn(const std::string& url, int rounds) {
  int failed = 0;
  for (int round = 0; round < rounds; ++round) {
    const std::string lost = lost_with(url, round, true);
    if (!lost.empty()) {
      ++failed;
      std::printf("round %d failed: %s\n", round, lost.c_str());
    } else if (loaded_number(url) != round) {
      complain(round, "another checkpoint is there");
    }
  }
  if (failed * 1000 > rounds) ++wrong;
  std::printf("%d of %d saves failed\n", failed, rounds);
}

// As a set of files, staged on the disk, and as DCP. Every tensor is in several files.
void stop_anywhere(const std::string& url, int rounds) {
  const Numbered numbered(7);
  const std::string from = url + "/from";
  if (const std::string lost = lost_with(from, 7, true); !lost.empty()) return complain(-1, lost);
  int stopped = 0;
  for (int round = 0; round < rounds; ++round) {
    const std::string to = url + "/to" + std::to_string(round);
    std::stop_source source;
    const auto stop_at = [&](const Progress& progress) {
      if (progress.done * static_cast<std::uint64_t>(rounds) >=
          progress.total * static_cast<std::uint64_t>(round))
        source.request_stop();
    };
    ConvertOptions options;
    options.to = round % 2 == 0 ? CheckpointKind::safetensors : CheckpointKind::dcp;
    options.max_shard_size = round % 2 == 0 ? 5000 : 0;
    options.progress = stop_at;
    options.stop = source.get_token();
    try {
      (void)convert(from, to, options);
      (void)Checkpoint::open(to).load();
    } catch (const Error& error) {
      ++stopped;
      if (error.code() != ErrorCode::cancelled) complain(round, error.what());
      for (const ObjectInfo& left : open_store(to)->list()) complain(round, "left: " + left.name);
    }
  }
  if (stopped == 0) complain(rounds, "nothing was stopped");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const std::string what = argv[1], url = argv[2];
  const int count = std::atoi(argv[3]);
  try {
    if (what == "races") {
      for (int round = 0; round < count; ++round) race(url, round);
    } else if (what == "loads") {
      load_while_replaced(url, count);
    } else if (what == "stops") {
      stop_anywhere(url, count);
    } else {
      save_in_turn(url, count);
    }
  } catch (const Error& error) {
    complain(-1, error.what());
  }
  std::printf("%d %s, %d wrong\n", count, what.c_str(), wrong);
  return wrong > 0 ? 1 : 0;
}
