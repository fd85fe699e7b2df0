// Tessera's checkpointers on OLMo's model in FSDP1: what peers/checkpointers.py does with OLMo's
// own.
//
//   bench_checkpointers --kind KIND --config FILE [--save DIRECTORY] [--restore DIRECTORY]
//                       [--proofs ROUNDS]
//
// Under torchrun. One step has been trained. Prints one line of JSON, by rank 0: seconds of the
// slowest rank, and how far the peak of memory rose above what was in use before, in MB, of the
// rank where it rose most. What is saved is durable. With --proofs also the share of a restore that
// comparing digests takes: of medians of so many restores with them and without, in turns.
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "parity/olmo_training.h"
#include "tessera/mesh.h"

namespace {

using nlohmann::json;

// VmRSS or VmHWM, in MB.
double memory(const std::string& what) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(what + ":")) return std::stod(line.substr(what.size() + 1)) / 1024;
  return 0;
}

// The most that any rank has.
double most(double mine, tessera::Group& group) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&mine);
  double found = mine;
  for (const auto& message : group.all_gather(tessera::Bytes(bytes, bytes + sizeof mine))) {
    double other = 0;
    std::memcpy(&other, message.data(), sizeof other);
    found = std::max(found, other);
  }
  return found;
}

void measure(const std::string& name, tessera::Group& group, json& found,
             const std::function<void()>& work) {
  std::ofstream("/proc/self/clear_refs") << "5";  // VmHWM begins anew
  const double at_rest = memory("VmRSS");
  group.barrier();
  const auto begin = std::chrono::steady_clock::now();
  work();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  found[name + "_s"] = most(seconds.count(), group);
  found[name + "_above_mb"] = most(memory("VmHWM") - at_rest, group);
}

// Restores without the digests that lie beside the checkpoint.
class WithoutDigests {
 public:
  WithoutDigests(std::string directory, bool leads, tessera::Group& group)
      : file_(std::move(directory) + "/tessera-state.json"), leads_(leads), group_(group) {
    move(file_, file_ + ".away");
  }
  ~WithoutDigests() { move(file_ + ".away", file_); }

 private:
  void move(const std::string& from, const std::string& to) {
    group_.barrier();
    if (leads_) std::filesystem::rename(from, to);
    group_.barrier();
  }

  std::string file_;
  bool leads_;
  tessera::Group& group_;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.at(values.size() / 2);
}

}  // namespace

int main(int argc, char** argv) {
  std::map<std::string, std::string> options;
  for (int i = 1; i + 1 < argc; i += 2) options[argv[i]] = argv[i + 1];
  try {
    at::set_num_threads(1);
    tessera::MeshOptions on_cpu;
    on_cpu.device = torch::kCPU;
    auto mesh = tessera::Mesh::from_environment(on_cpu);
    tessera::testing::Training training({{"config", options.at("--config")}}, mesh);
    training.draw_batch();
    (void)training.step();
    auto& group = mesh.checkpoint_group();
    const auto& kind = options.at("--kind");
    auto found = json::object();
    if (options.contains("--save"))
      measure("save", group, found, [&] { training.save(kind, options["--save"]); });
    if (options.contains("--restore"))
      measure("restore", group, found, [&] { training.restore(kind, options["--restore"]); });
    if (options.contains("--proofs")) {
      std::vector<double> with, without;
      const auto restore = [&](std::vector<double>& seconds) {
        auto once = json::object();
        measure("restore", group, once, [&] { training.restore(kind, options["--restore"]); });
        seconds.push_back(once["restore_s"]);
      };
      for (int round = std::stoi(options["--proofs"]); round > 0; --round) {
        restore(with);
        const WithoutDigests hidden(options["--restore"], mesh.rank() == 0, group);
        restore(without);
      }
      found["proof_share"] = 1 - median(without) / median(with);
    }
    if (mesh.rank() == 0) std::printf("%s\n", found.dump().c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_checkpointers: %s\n", error.what());
    return 1;
  }
  return 0;
}
