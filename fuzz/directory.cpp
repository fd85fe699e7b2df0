// Directories, on a disk or in memory: whatever is in them, opening ends with a checkpoint or an
// Error, and what one function says of it is what the others do with it.
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>

#include "drawn_directory.h"
#include "target.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/restore.h"
#include "tessera/run_directory.h"
#include "tessera/stateful.h"
#include "tessera/verify.h"

namespace tessera::fuzz {
namespace {

namespace fs = std::filesystem;

// In memory, where the machine has it.
class Scratch {
 public:
  Scratch() {
    std::string path = fs::is_directory("/dev/shm") ? "/dev/shm" : fs::temp_directory_path();
    path += "/tessera-fuzz-XXXXXX";
    if (::mkdtemp(path.data()) == nullptr) throw std::runtime_error("no directory can be made");
    path_ = path;
    fs::create_directories(path_ + "/own");
    checkpoints_ =
        checkpoints_of_all_kinds(std::string(TESSERA_TEST_DATA) + "/golden", path_ + "/own");
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    std::error_code none;
    fs::remove_all(path_, none);
  }

  [[nodiscard]] const std::vector<Files>& checkpoints() const { return checkpoints_; }
  // An empty directory, the same for each input.
  [[nodiscard]] std::string fresh() const {
    const std::string path = path_ + "/drawn";
    fs::remove_all(path);
    fs::create_directories(path);
    return path;
  }

 private:
  std::string path_;
  std::vector<Files> checkpoints_;
};

template <typename Work>
bool succeeds(const Work& work) {
  try {
    work();
  } catch (const Error&) {
    return false;
  }
  return true;
}

void require(bool condition, const std::string& what) {
  if (!condition) throw std::logic_error(what);
}

bool is_olmo_of_ranks(CheckpointKind kind) {
  return kind == CheckpointKind::olmo_legacy || kind == CheckpointKind::rank_files;
}

// That a question about the kind and the opener answer alike.
void require_kind(std::optional<CheckpointKind> told, const Checkpoint& opened) {
  const std::string kind(to_string(opened.kind));
  if (!told) {
    const bool is_other =
        opened.kind == CheckpointKind::dcp || opened.kind == CheckpointKind::safetensors ||
        opened.kind == CheckpointKind::torch_file || opened.kind == CheckpointKind::rank_files ||
        opened.kind == CheckpointKind::torchscript || opened.kind == CheckpointKind::exported ||
        opened.kind == CheckpointKind::gguf;
    return require(is_other, "none of OLMo's kinds is opened as " + kind);
  }
  if (*told == CheckpointKind::olmo_legacy)
    return require(is_olmo_of_ranks(opened.kind), "files of ranks are opened as " + kind);
  if (*told == CheckpointKind::olmo_full && opened.kind == CheckpointKind::torch_file)
    return;  // a model.pt alone
  require(*told == opened.kind, std::string(to_string(*told)) + " is opened as " + kind);
}

void require_consistent(const Location& where, const Checkpoint& opened) {
  constexpr int kMostRanks = 1 << 20;
  require(opened.world_size >= 0 && opened.world_size <= kMostRanks,
          "a checkpoint of " + std::to_string(opened.world_size) + " ranks");
  require_kind(olmo_kind_at(where), opened);
  VerifyOptions options;
  options.threads = 1;
  std::string finding;
  const bool verified = succeeds([&] {
    const VerifyReport report = verify(opened, options);
    if (!report.findings.empty()) finding = report.findings.front().text;
  });
  require(verified, "what was opened cannot be verified");
  if (!finding.empty() || !succeeds([&] { (void)opened.tree(); })) return;
  LoadOptions load;
  load.threads = 1;
  try {
    (void)opened.load(load);
  } catch (const Error& error) {
    throw std::logic_error(std::string("is verified and cannot be loaded: ") + error.what());
  }
}

void judge(const Location& where) {
  const std::unique_ptr<Group> group = solo_group();
  succeeds([&] { (void)trainer_state(where, {}, *group); });
  succeeds([&] { (void)latest_checkpoint(where); });
  succeeds([&] { (void)verify(where, {.threads = 1}); });
  succeeds([&] { (void)gc(where); });
  if (!where.path.empty()) succeeds([&] { (void)scan(where.path); });
  require_consistent(where, Checkpoint::open(where));
}

}  // namespace

void parse(ByteView input) {
  static const Scratch scratch;
  const Entries entries = drawn_directory(input, scratch.checkpoints());
  if (input.size() % 3 == 0) return judge(in_memory(entries));
  const std::string path = scratch.fresh();
  write_entries(path, entries);
  judge(path);
}

}  // namespace tessera::fuzz
