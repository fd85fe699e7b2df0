#include "checkpoint/together/state_sums.h"

#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/crc32.h"
#include "base/digest.h"
#include "base/parallel.h"
#include "checkpoint/read/json_writer.h"
#include "checkpoint/save/planned_leaf.h"
#include "checkpoint/together/share.h"
#include "comm/confer.h"
#include "comm/message.h"
#include "layout/boxes.h"
#include "tessera/error.h"
#include "tessera/leaf.h"
#include "value/equality.h"

namespace tessera {
namespace {

constexpr const char* kDigests = "crc32";

// So that differences of several parts do not make up for one another.
std::uint64_t mixed(std::uint32_t terms, int part) {
  std::uint64_t value = (static_cast<std::uint64_t>(part) << 32U | terms) + 1;
  value *= 0x9E3779B97F4A7C15U;
  return (value ^ value >> 29U) * 0xBF58476D1CE4E5B9U;
}

// What this rank holds of a tensor, as bytes of the tensor.
WrittenSum sum_held(const PlacedTensor& placed, const std::vector<Box>& held) {
  const Tensor& tensor = placed.leaf->value.as_tensor();
  RunTarget whole_tensor;
  whole_tensor.size = byte_size(tensor.dtype, tensor.shape);
  TensorReader reader(tensor, placed.leaf->name);
  return write_runs(tensor, reader, held, whole(tensor.shape), whole_tensor, nullptr).row;
}

TensorSum sum_tensor(const PlacedTensor& placed, const TensorSums& written, const SumJob& job) {
  const Tensor& tensor = placed.leaf->value.as_tensor();
  const int part = part_of_rank(placed.placement, job.rank);
  const std::vector<Box> held = boxes_of_part(placed.placement, tensor.shape, part);
  std::uint64_t size = 0;
  for (const Box& box : held) size += byte_size(tensor.dtype, box.sizes);
  const auto found = written.find(placed.leaf);
  const bool is_known = found != written.end() && found->second.bytes == size;
  const WrittenSum own = is_known ? found->second : sum_held(placed, held);
  const Holders holders = holders_of(placed.placement, job.rank, job.ranks);
  const std::uint64_t value = mixed(own.terms, part);
  if (holders.index > 0) return {0, 0 - value, 0};
  return {own.bytes, static_cast<std::uint64_t>(holders.count - 1) * value, own.terms};
}

std::vector<Leaf> tensors_in(const Value& tree) {
  std::vector<Leaf> leaves = leaves_of(tree);
  std::erase_if(leaves, [](const Leaf& leaf) { return !leaf.value.is(Value::Kind::tensor); });
  return leaves;
}

std::vector<const Leaf*> pointers_to(const std::vector<Leaf>& leaves) {
  std::vector<const Leaf*> pointers;
  for (const Leaf& leaf : leaves) pointers.push_back(&leaf);
  return pointers;
}

StateDigests digests_in(const nlohmann::json& file) {
  StateDigests digests;
  for (const auto& [name, crc] : file.at(kDigests).items())
    digests.emplace(name, crc.get<std::uint32_t>());
  return digests;
}

}  // namespace

StateSums sum_state(const PlacedTensors& tensors, const TensorSums& written, const SumJob& job) {
  StateSums sums(tensors.all().size());
  parallel_for(job.threads, sums.size(), [&](std::size_t i) {
    require_going_on(job.stop);
    sums[i] = sum_tensor(tensors.all()[i], written, job);
  });
  return sums;
}

void join_state_sums(StateSums& all, const StateSums& more) {
  if (all.size() != more.size())
    throw Error(ErrorCode::mismatch, "ranks have states of different tensors");
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i].bytes += more[i].bytes;
    all[i].difference += more[i].difference;
    all[i].terms ^= more[i].terms;
  }
}

SummedState summed(const PlacedTensors& tensors, const StateSums& sums) {
  SummedState result;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const Leaf& leaf = *tensors.all()[i].leaf;
    const std::uint64_t size =
        byte_size(leaf.value.as_tensor().dtype, leaf.value.as_tensor().shape);
    if (sums[i].bytes != size) {
      throw Error(ErrorCode::incomplete, "ranks hold " + std::to_string(sums[i].bytes) +
                                             " bytes of the tensor, it has " + std::to_string(size))
          .at_key(leaf.name);
    }
    result.digests.emplace(leaf.name, crc32_of_terms(sums[i].terms, size));
    if (sums[i].difference != 0) result.unlike.push_back(leaf.name);
  }
  return result;
}

std::string state_file_text(const StateDigests& digests, const std::string& save_id) {
  JsonWriter json(BadText::replace, BeyondAscii::as_it_is);
  json.begin('{');
  json.key(kDigests);
  json.begin('{');
  for (const auto& [name, crc] : digests) {
    json.name(name);
    json.integer(crc);
  }
  json.end('}');
  json.key("save_id");
  json.text(save_id);
  json.key("version");
  json.integer(1);
  json.end('}');
  return json_in_lines(json.json()) + "\n";
}

StateDigests saved_digests(const Store& checkpoint) {
  if (!checkpoint.exists(kStateFile)) return {};
  const auto source = checkpoint.open(kStateFile);
  const std::vector<std::byte> bytes = read_all(*source, kStateFileLimit);
  const auto* text = reinterpret_cast<const char*>(bytes.data());
  try {
    return digests_in(nlohmann::json::parse(text, text + bytes.size()));
  } catch (const nlohmann::json::exception&) {
    throw Error(ErrorCode::corrupt, "not the digests of a state").at_path(source->name());
  }
}

struct LoadedSums::Sums {
  std::mutex mutex;
  std::map<std::string, WrittenSum> of;  // by key; guarded by mutex

  void add(const std::string& key, const Tensor& tensor, std::int64_t first, ByteView bytes) {
    const std::uint64_t size = byte_size(tensor.dtype, tensor.shape);
    const std::uint64_t at = static_cast<std::uint64_t>(first) * size_of(tensor.dtype);
    const std::uint32_t term = crc32_term(crc32(bytes), bytes.size(), size - at - bytes.size());
    const std::lock_guard lock(mutex);
    of[key].add({bytes.size(), term});
  }

  [[nodiscard]] TensorSums of_leaves(const std::vector<Leaf>& leaves) const {
    TensorSums found;
    for (const Leaf& leaf : leaves) {
      if (const auto known = of.find(leaf.name); known != of.end())
        found.emplace(&leaf, known->second);
    }
    return found;
  }
};

LoadedSums::LoadedSums() : sums_(std::make_unique<Sums>()) {}
LoadedSums::~LoadedSums() = default;

FilledHook LoadedSums::hook() {
  return [this](const std::string& key, const Tensor& tensor, std::int64_t first, ByteView bytes) {
    sums_->add(key, tensor, first, bytes);
  };
}

bool is_saved_as(const Store& checkpoint, const std::string& save_id) {
  if (!checkpoint.exists(kStateFile)) return false;
  const std::vector<std::byte> bytes = read_all(*checkpoint.open(kStateFile), kStateFileLimit);
  const auto* text = reinterpret_cast<const char*>(bytes.data());
  const auto file = nlohmann::json::parse(text, text + bytes.size(), nullptr, false);
  return file.is_object() && file.contains("save_id") && file["save_id"] == save_id;
}

StateDigests state_digests(const Value& tree, Group& group, int threads, const LoadedSums* loaded) {
  std::vector<Leaf> leaves;
  std::optional<PlacedTensors> tensors;
  const auto contribute = [&] {
    require_threads(threads);
    leaves = tensors_in(tree);
    tensors.emplace(pointers_to(leaves), group.rank(), group.size());
    const TensorSums known = loaded == nullptr ? TensorSums() : loaded->sums_->of_leaves(leaves);
    return sum_state(*tensors, known, {group.rank(), group.size(), threads});
  };
  const auto conclude = [&](const StateSums& all) {
    SummedState state = summed(*tensors, all);
    if (!state.unlike.empty()) {
      throw Error(ErrorCode::mismatch, std::to_string(state.unlike.size()) +
                                           " tensors differ between ranks that hold the same part")
          .at_key(state.unlike.front());
    }
    return std::move(state.digests);
  };
  return from_message<StateDigests>(
      confer(group, "digesting a state", conference_of(contribute, join_state_sums, conclude)));
}

namespace {

using DigestsOfRank = std::map<std::string, std::uint64_t>;

ByteView bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

NamedDigests values_of(const OlmoState& state, const NamedDigests& more) {
  NamedDigests values;
  const auto no_elements = [](const Tensor&) { return std::uint64_t{0}; };
  OlmoState shared{state.model, state.optim, {}};
  for (const Leaf& leaf : leaves_of(shared.tree())) {
    if (leaf.value.is(Value::Kind::tensor)) continue;
    values.emplace_back(leaf.name, digest_of(leaf.value, no_elements));
  }
  values.insert(values.end(), more.begin(), more.end());
  return values;
}

DigestsOfRank digests_of(const OlmoState& state, const NamedDigests& more,
                         const PlacedTensors& tensors) {
  DigestsOfRank digests;
  for (const auto& [name, digest] : values_of(state, more)) digests.emplace(name, digest);
  for (const PlacedTensor& placed : tensors.all()) {
    const Tensor& tensor = placed.leaf->value.as_tensor();
    const std::string is = std::string(to_string(tensor.dtype)) + to_string(tensor.shape);
    digests.emplace(placed.leaf->name, digest64(bytes_of(is)));
  }
  return digests;
}

[[noreturn]] void refuse_differences(const std::vector<DigestsOfRank>& ranks) {
  std::map<std::string, std::size_t> unlike;  // keys, and the first rank that has it otherwise
  for (std::size_t r = 1; r < ranks.size(); ++r) {
    const auto note_unlike = [&unlike, r](const DigestsOfRank& mine, const DigestsOfRank& others) {
      for (const auto& [key, digest] : mine) {
        const auto other = others.find(key);
        if (other == others.end() || other->second != digest) unlike.emplace(key, r);
      }
    };
    note_unlike(ranks[0], ranks[r]);
    note_unlike(ranks[r], ranks[0]);
  }
  KeyErrors errors;
  for (const auto& [key, rank] : unlike) {
    errors.add(
        Error(ErrorCode::mismatch, "ranks 0 and " + std::to_string(rank) +
                                       " do not have the same here, outside of the trainer's state")
            .at_key(key));
  }
  errors.require_none();
  throw Error(ErrorCode::mismatch, "ranks hold other parts of tensors than they say");
}

}  // namespace

std::uint64_t digest_of_values(const OlmoState& state, const NamedDigests& more) {
  RunningDigest all;
  for (const auto& [name, digest] : values_of(state, more)) {
    all.add(bytes_of(name));
    all.add(std::as_bytes(std::span(&digest, 1)));
  }
  return all.value();
}

void refuse_difference(const OlmoState& state, const NamedDigests& more,
                       const PlacedTensors& tensors, Group& group) {
  const auto contribute = [&] { return to_message(digests_of(state, more, tensors)); };
  const auto conclude = [](const Bytes& all) -> Bytes {
    refuse_differences(all_from_message<DigestsOfRank>(all));
  };
  (void)confer(group, "comparing states", {contribute, side_by_side, conclude});
}

}  // namespace tessera
