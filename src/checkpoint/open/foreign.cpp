#include "checkpoint/open/foreign.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <set>
#include <span>
#include <utility>

#include "base/numbers.h"
#include "base/text.h"
#include "checkpoint/open/directory.h"
#include "format/zip/zip.h"
#include "io/source.h"
#include "storage/storage.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera {
namespace {

constexpr std::size_t kNameLength = 26;   // where a zip's local header has it, 2 bytes
constexpr std::size_t kLocalHeader = 30;  // bytes; the name follows

// Of the first record of a zip; empty: it is none, or cut.
std::string first_record(const ByteSource& file) {
  if (file.size() < kLocalHeader) return {};
  const auto head = head_of<kLocalHeader>(file);
  const auto* const bytes = reinterpret_cast<const std::byte*>(head.data());
  if (load_le<std::uint32_t>(bytes) != zip::kLocalHeader) return {};
  const std::size_t length = load_le<std::uint16_t>(bytes + kNameLength);
  if (length > file.size() - kLocalHeader) return {};
  std::string name(length, '\0');
  file.read_at(kLocalHeader, std::as_writable_bytes(std::span(name)));
  return name;
}

// "mp_rank_00", and with pipelines "mp_rank_00_003".
bool is_megatron_folder(std::string_view name) {
  constexpr std::string_view kStart = "mp_rank_";
  return name.starts_with(kStart) && name.size() > kStart.size() &&
         name.find_first_not_of("0123456789_", kStart.size()) == std::string_view::npos;
}

bool has_megatron_folder(const Store& store) {
  return std::ranges::any_of(store.list_directories(), [&store](const std::string& folder) {
    return is_megatron_folder(folder) && store.exists(folder + "/model_optim_rng.pt");
  });
}

[[noreturn]] void refuse(const std::string& what, const std::string& path) {
  throw Error(ErrorCode::unsupported, what).at_path(path);
}

}  // namespace

void refuse_foreign_archive(const ByteSource& file) {
  if (file.name().ends_with(".nemo")) {
    refuse(
        "the file is a NeMo archive, a tar of a checkpoint and its config: unpack it, and open the "
        "checkpoint that is in it",
        file.name());
  }
  if (file.name().ends_with(".npz") && first_record(file).ends_with(".npy"))
    refuse("the file is an .npz file of numpy, a zip of arrays", file.name());
}

void refuse_foreign_directory(const Store& store, const std::vector<ObjectInfo>& files) {
  if (has_object(files, "_CHECKPOINT_METADATA") || has_object(files, "manifest.ocdbt")) {
    refuse(
        "the directory is a checkpoint of JAX by Orbax, whose arrays lie in OCDBT of TensorStore",
        store.name());
  }
  if (has_megatron_folder(store)) {
    refuse(
        "the directory is a checkpoint of Megatron-LM in its older form: "
        "mp_rank_*/model_optim_rng.pt "
        "do not say how tensors are cut; Megatron-LM converts it (--ckpt-convert-format "
        "torch_dist)",
        store.name());
  }
}

namespace {

constexpr std::string_view kLeftBehind =
    "named like the state of a training, which is not in what was opened";
constexpr std::array<std::string_view, 6> kStateEnds{".pt",  ".pth",  ".bin",
                                                     ".pkl", ".json", ".ckpt"};
constexpr std::array<std::string_view, 17> kStateNames{
    "optimizer",        "optim",          "optimizer_state", "scheduler",
    "lr_scheduler",     "rng_state",      "random_state",    "random_states",
    "scaler",           "grad_scaler",    "sampler",         "common",
    "trainer_state",    "training_state", "train_state",     "training_args",
    "custom_checkpoint"};

// "rng_state" of "rng_state_3": the number is a rank's, or counts optimizers.
std::string_view without_number(std::string_view name) {
  const std::size_t at = name.rfind('_');
  return at != std::string_view::npos && plain_number(name.substr(at + 1)) ? name.substr(0, at)
                                                                           : name;
}

}  // namespace

bool is_training_state(std::string_view name) {
  const std::size_t dot = name.rfind('.');
  if (dot == std::string_view::npos) return false;
  return std::ranges::find(kStateEnds, name.substr(dot)) != kStateEnds.end() &&
         std::ranges::find(kStateNames, without_number(name.substr(0, dot))) != kStateNames.end();
}

void remark_left_behind(const std::vector<ObjectInfo>& files, Checkpoint& checkpoint) {
  std::set<std::string> known;
  for (const ObjectInfo& file : checkpoint.files) known.insert(file.name);
  for (const FileRow& row : checkpoint.remarks) known.insert(row.name);
  std::vector<FileRow> rows;
  for (const ObjectInfo& file : files) {
    if (is_training_state(file.name) && !known.contains(file.name))
      rows.push_back({file.name, FileState::not_part, std::string(kLeftBehind), file.size});
  }
  remark(std::move(rows), checkpoint);
}

std::string text_of_left_behind(const Checkpoint& checkpoint) {
  Named named;
  for (const FileRow& row : checkpoint.remarks) {
    if (row.reason == kLeftBehind) named.add(printable(row.name, 200));
  }
  return named.count() == 0 ? "" : named.text() + ": " + std::string(kLeftBehind);
}

}  // namespace tessera
