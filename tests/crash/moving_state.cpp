// Saves in the background while an optimizer goes on: what is on disk is what the tensors were at
// the call (fault-rows R15).
//   moving_state COMMAND DIRECTORY SAVES SEED
// COMMAND is `tessera`. SAVES in turns by a thread and by a process, half of them copied when
// save() has returned. Two threads change all tensors without end, but for the calls of save() and
// the copies behind them, for which they wait as a step of an optimizer does; each digest of a
// tensor at its call has to be that of what is loaded. Prints a line for each save that goes wrong
// and a summary; exits with 1 when one did.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/copies.h"
#include "base/digest.h"
#include "multirank/forked_ranks.h"
#include "tessera/checkpoint.h"
#include "tessera/checkpoint_writer.h"
#include "tessera/leaf.h"

namespace {

using namespace tessera;

constexpr int kOptimizers = 2;  // threads

struct Parameter {
  std::string name;
  std::vector<float> elements;
};

// The tensors of a model; what changes them holds the lock shared, what saves them alone.
class MovingModel {
 public:
  MovingModel() {
    for (int i = 0; i < 24; ++i) {
      const auto size = static_cast<std::size_t>(1) << (static_cast<unsigned>(i) % 20U);
      parameters_.push_back({"p" + std::to_string(i), std::vector<float>(size, 1.0F)});
    }
    for (int i = 0; i < kOptimizers; ++i)
      threads_.emplace_back([this, i](const std::stop_token& stop) { step(i, stop); });
  }

  // Calls `save` with the tree while nothing changes. Returns the digests of that moment.
  template <typename Save>
  std::map<std::string, std::uint64_t> hold(const Save& save) {
    const std::lock_guard lock(mutex_);
    std::map<std::string, std::uint64_t> digests;
    Value tree = Value::dict();
    for (Parameter& one : parameters_) {
      const auto bytes = std::as_writable_bytes(std::span(one.elements));
      digests[one.name] = digest64(bytes);
      Tensor tensor;
      tensor.shape = {static_cast<std::int64_t>(one.elements.size())};
      auto storage = std::make_shared<Storage>();
      storage->data = bytes.data();
      storage->size = bytes.size();
      tensor.pieces.push_back({whole(tensor.shape), std::move(storage), 0, {}});
      tree.set_item(one.name, Value(std::move(tensor)));
    }
    save(tree);
    return digests;
  }

 private:
  void step(int number, const std::stop_token& stop) {
    for (float rate = 1; !stop.stop_requested(); rate += 1) {
      for (std::size_t i = static_cast<std::size_t>(number); i < parameters_.size();
           i += kOptimizers) {
        const std::shared_lock lock(mutex_);
        begin_step();
        for (float& element : parameters_[i].elements) element += rate;
      }
      std::this_thread::yield();
    }
  }

  std::vector<Parameter> parameters_;
  std::shared_mutex mutex_;
  std::vector<std::jthread> threads_;
};

std::string difference(const std::map<std::string, std::uint64_t>& digests,
                       const std::string& path) {
  const Value tree = Checkpoint::open(path).load();
  for (const auto& [name, digest] : digests) {
    const Storage& storage = *tree.at(name).as_tensor().pieces.at(0).storage;
    if (digest64({storage.data, static_cast<std::size_t>(storage.size)}) != digest)
      return " " + name + " is not what it was at the call;";
  }
  return "";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const std::string directory = argv[2];
  WriterOptions options;
  options.idle = false;
  options.overlap = Overlap::always;
  CheckpointWriter thread(options);
  options.process = true;
  options.program = argv[1];
  CheckpointWriter process(options);
  MovingModel model;
  int number = 0;
  const int wrong = testing::repeat(
      std::atoi(argv[3]), static_cast<unsigned>(std::atoi(argv[4])),
      [&](const testing::Below& below) -> testing::Outcome {
        const bool by_process = ++number % 2 == 0;
        const bool beside = below(2) == 0;
        SteadyMemory steady;
        if (beside) steady.has = [](const Storage& /*storage*/) { return true; };
        const std::string place = directory + "/step" + std::to_string(number);
        std::optional<PendingSave> pending;
        const auto digests = model.hold([&](const Value& tree) {
          pending = (by_process ? process : thread).save(tree, place, {}, {}, std::move(steady));
        });
        std::this_thread::sleep_for(std::chrono::microseconds(below(2000)));
        pending->result();
        std::string found = difference(digests, place);
        std::filesystem::remove_all(place);
        return {std::string(by_process ? "by a process" : "by a thread") +
                    (beside ? ", beside the steps" : ""),
                std::move(found)};
      });
  return wrong > 0 ? 1 : 0;
}
