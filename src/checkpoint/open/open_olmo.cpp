// The OLMo kinds whose parts are whole files or a DCP checkpoint: olmo_full, olmo_torch_new.
#include <algorithm>
#include <array>

#include "base/numbers.h"
#include "checkpoint/open/dcp_parts.h"
#include "checkpoint/open/olmo_state.h"
#include "checkpoint/open/open.h"
#include "checkpoint/open/rank_files.h"
#include "format/olmo/keys.h"
#include "format/olmo/yaml.h"
#include "format/safetensors/safetensors.h"
#include "format/torch/torch_file.h"
#include "storage/lazy_source.h"
#include "tessera/error.h"
#include "value/children.h"

namespace tessera {
namespace {

using Kind = Value::Kind;

constexpr std::uint64_t kPickledLimit = 64 << 20;  // bytes of a value beside the tensors

const ObjectInfo* find_file(const std::vector<ObjectInfo>& files, std::string_view name) {
  const auto found = std::ranges::find(files, name, &ObjectInfo::name);
  return found == files.end() ? nullptr : &*found;
}

bool has_file(const std::vector<ObjectInfo>& files, std::string_view name) {
  return find_file(files, name) != nullptr;
}

Value value_of(const safetensors::Entry& entry, const olmo::Key& key,
               const std::shared_ptr<Storage>& storage) {
  if (!key.pickled) {
    Tensor tensor;
    tensor.dtype = entry.dtype;
    tensor.shape = entry.shape;
    tensor.pieces.push_back(Piece{whole(entry.shape), storage, 0, {}, -1});
    return Value(std::move(tensor));
  }
  if (storage->size > kPickledLimit) {
    throw Error(ErrorCode::limit, "a pickled value of " + std::to_string(storage->size) + " bytes");
  }
  std::vector<std::byte> bytes(storage->size);
  storage->source->read_at(storage->offset, bytes);
  return olmo::decode_value(bytes);
}

// What the config says, as far as it can be read: a checkpoint does not depend on it.
void note_config(const Store& store, Checkpoint& checkpoint) {
  if (!store.exists(olmo::kConfigFile)) return;
  const auto source = store.open(olmo::kConfigFile);
  checkpoint.files.push_back({std::string(olmo::kConfigFile), source->size()});
  try {
    (void)olmo::sharded_checkpointer_of(read_all(*source, olmo::kYamlLimit));
  } catch (const Error& error) {
    checkpoint.warnings.push_back("config.yaml cannot be read: " + std::string(error.what()));
  }
}

// What only OLMo has beside a model.safetensors.
constexpr std::array<std::string_view, 5> kBesideModel{"optim.safetensors", "optim.pt", "train.pt",
                                                       "other.pt", "config.yaml"};

// OLMo would go on with rank 0's state where another rank's is missing.
void require_trains_of_all(int ranks, const Checkpoint& checkpoint) {
  if (ranks >= checkpoint.world_size) return;
  throw Error(ErrorCode::incomplete, "there are " + std::to_string(ranks) +
                                         " files train/rank*.pt, data files are of " +
                                         std::to_string(checkpoint.world_size) + " ranks")
      .at_path(checkpoint.path);
}

}  // namespace

Value read_olmo_safetensors(const std::shared_ptr<const ByteSource>& source) {
  const safetensors::Header header = safetensors::read_header(*source);
  Value root = Value::dict();
  for (const safetensors::Entry& entry : header.entries) {
    const std::optional<olmo::Key> key = olmo::decode_key(entry.name);
    if (!key) {
      throw Error(ErrorCode::unsupported, "the name is not one that OLMo gives")
          .at_path(source->name())
          .at_key(entry.name);
    }
    auto storage = std::make_shared<Storage>();
    storage->source = source;
    storage->offset = checked_add(header.data_offset, entry.begin);
    storage->size = entry.end - entry.begin;
    storage->dtype = entry.dtype;
    try {
      olmo::put_at(root, key->keys, value_of(entry, *key, storage));
    } catch (Error& error) {
      throw error.at_path(source->name()).at_key(entry.name);
    }
  }
  return root;
}

std::optional<Value> read_olmo_part(const std::shared_ptr<Store>& store,
                                    const std::vector<ObjectInfo>& files, const std::string& name,
                                    std::vector<ObjectInfo>& used) {
  // As OLMo looks: safetensors first (checkpoint-rows O-15).
  if (const ObjectInfo* file = find_file(files, name + ".safetensors")) {
    used.push_back(*file);
    return read_olmo_safetensors(std::make_shared<LazySource>(store, *file));
  }
  const ObjectInfo* file = find_file(files, name + ".pt");
  if (file == nullptr) return std::nullopt;
  used.push_back(*file);
  return torch_file::read(std::make_shared<LazySource>(store, *file));
}

// Beside the one file at its root. What is closed to us is not the checkpoint's.
bool has_no_other(const Store& store) {
  if (!store.has_directories()) return store.list().size() == 1;
  return store.list_level().size() == 1 &&
         std::ranges::none_of(store.list_directories(), [&store](const std::string& directory) {
           try {
             return !store.list(directory).empty();
           } catch (const Error&) {
             return false;
           }
         });
}

bool has_torch_new_files(const std::vector<ObjectInfo>& files) {
  return has_file(files, "model_and_optim/.metadata");
}

bool has_full_files(const std::vector<ObjectInfo>& files) {
  const auto has = [&files](std::string_view name) { return has_file(files, name); };
  return has("model.pt") || (has("model.safetensors") && std::ranges::any_of(kBesideModel, has));
}

Checkpoint open_olmo_full(std::shared_ptr<Store> store, const std::vector<ObjectInfo>& files) {
  Checkpoint checkpoint;
  checkpoint.kind = CheckpointKind::olmo_full;
  checkpoint.path = store->name();
  Value model = *read_olmo_part(store, files, "model", checkpoint.files);
  const bool alone = files.size() == 1 && find_entry(model, "model") != nullptr;
  if (alone && has_no_other(*store)) return open_torch(std::move(store), files.front());
  require_whole(model, checkpoint.path + "/model.pt");
  OlmoState state = olmo_state_of(Value::dict({{"model", std::move(model)}}));
  if (auto optim = read_olmo_part(store, files, "optim", checkpoint.files)) {
    state.optim = named_optim(*optim);
  }
  state.train = read_olmo_part(store, files, "train", checkpoint.files);
  if (!state.train) state.train = read_olmo_part(store, files, "other", checkpoint.files);
  checkpoint.root = state.tree();
  checkpoint.leaves = leaves_of(*checkpoint.root);
  note_config(*store, checkpoint);
  checkpoint.store = std::move(store);
  require_coverage(checkpoint);
  return checkpoint;
}

Checkpoint open_olmo_torch_new(const std::shared_ptr<Store>& store, const OpenOptions& options) {
  Checkpoint checkpoint = open_dcp_below(store, std::string(olmo::kDcpFolder), options);
  checkpoint.kind = CheckpointKind::olmo_torch_new;
  checkpoint.has_types = false;  // OLMo has its own for each part
  const auto trains = rank_files(store->list_level("train"), own_prefix("train"), checkpoint.path);
  const int ranks = static_cast<int>(trains.size());
  if (ranks > 0) {
    require_trains_of_all(ranks, checkpoint);
    const Value train = torch_file::read(std::make_shared<LazySource>(store, trains[0]));
    const std::vector<Leaf> leaves = leaves_of(Value::dict({{"train", train}}));
    checkpoint.leaves.insert(checkpoint.leaves.end(), leaves.begin(), leaves.end());
  }
  checkpoint.files.insert(checkpoint.files.end(), trains.begin(), trains.end());
  checkpoint.world_size = std::max(checkpoint.world_size, ranks);
  note_config(*store, checkpoint);
  return checkpoint;
}

}  // namespace tessera
