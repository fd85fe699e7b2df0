#include "checkpoint/open/set_choice.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>
#include <utility>

#include "base/text.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera {
namespace {

using Files = std::vector<ObjectInfo>;

// What vLLM saves of each rank, in parts: model-rank-0-part-1.safetensors. All ranks' files have
// the same names of tensors.
constexpr std::string_view kRankPrefix = "model-rank-", kPart = "-part-";

struct RankPart {
  int rank = 0, part = 0;
};

std::optional<RankPart> rank_part_of(std::string_view name, const SetNames& names) {
  const std::size_t middle = name.find(kPart);
  if (middle == std::string_view::npos) return std::nullopt;
  const auto rank = number_between(kRankPrefix, name.substr(0, middle), "");
  const auto part = number_between(kPart, name.substr(middle), names.suffix);
  return rank && part ? std::optional(RankPart{*rank, *part}) : std::nullopt;
}

// Names of the same weights in another form: Mistral's own, and an adapter to a model.
bool is_other_form(std::string_view name) {
  constexpr std::array<std::string_view, 2> kForms{"consolidated", "adapter_model"};
  return std::ranges::any_of(kForms, [name](std::string_view form) {
    return name.starts_with(form) && (name[form.size()] == '.' || name[form.size()] == '-');
  });
}

void move_aside(Files& files, Files kept, const std::string& reason, SetChoice& choice) {
  for (const ObjectInfo& file : files) {
    if (std::ranges::find(kept, file.name, &ObjectInfo::name) == kept.end())
      choice.remarks.push_back({file.name, FileState::not_part, reason, file.size});
  }
  files = std::move(kept);
}

template <typename Fits>
Files those(const Files& files, const Fits& fits) {
  Files found;
  std::ranges::copy_if(files, std::back_inserter(found), fits);
  return found;
}

// The parts of one rank.
void choose_rank(int rank, const SetNames& names, const Store& store, SetChoice& choice) {
  int next = 0;
  const auto is_own = [&](const ObjectInfo& file) {
    const auto found = rank_part_of(file.name, names);
    return found && found->rank == rank;
  };
  Files own = those(choice.files, is_own);
  if (own.empty()) {
    throw Error(ErrorCode::not_found,
                "there are no files model-rank-" + std::to_string(rank) + "-part-*")
        .at_path(store.name());
  }
  std::ranges::sort(own, {},
                    [&](const ObjectInfo& file) { return rank_part_of(file.name, names)->part; });
  for (const ObjectInfo& file : own) {
    if (rank_part_of(file.name, names)->part == next++) continue;
    throw Error(ErrorCode::incomplete, "part " + std::to_string(next - 1) + " of rank " +
                                           std::to_string(rank) + " is missing")
        .at_path(store.name());
  }
  move_aside(choice.files, std::move(own), "not of rank " + std::to_string(rank), choice);
}

// Of files without an index.
void choose_files(const SetNames& names, const Store& store, SetChoice& choice) {
  const auto is_usual = [&](const ObjectInfo& file) { return file.name == names.usual; };
  const auto is_of_rank = [&](const ObjectInfo& file) {
    return rank_part_of(file.name, names).has_value();
  };
  const auto is_own_form = [](const ObjectInfo& file) { return !is_other_form(file.name); };
  if (Files usual = those(choice.files, is_usual); !usual.empty()) {
    move_aside(choice.files, std::move(usual), std::string(names.usual) + " is the model", choice);
    return;
  }
  if (std::ranges::any_of(choice.files, is_of_rank)) {
    throw Error(ErrorCode::unsupported,
                "a sharded state of vLLM; its files do not say how tensors are cut: --rank R reads "
                "what one rank has")
        .at_path(store.name());
  }
  if (Files own = those(choice.files, is_own_form); !own.empty())
    move_aside(choice.files, std::move(own), "another form of the model, or beside it", choice);
}

// An index that names the one file is about that.
void require_one(const std::string& index, const std::string& single, const Store& store) {
  for (const auto& [tensor, file] : read_set_index(store, index).files) {
    if (file == single) return;
  }
  throw Error(ErrorCode::conflict, "the index " + printable(index) + " and " + printable(single) +
                                       ", which it does not name, are both here: open the one that "
                                       "you mean")
      .at_path(store.name());
}

}  // namespace

SetChoice choose_set(const std::vector<ObjectInfo>& decided, const SetNames& names,
                     const Store& store, const OpenOptions& options) {
  SetChoice choice;
  choice.near = those(
      decided, [](const ObjectInfo& file) { return file.name.find('/') == std::string::npos; });
  choice.files =
      those(choice.near, [&](const ObjectInfo& file) { return file.name.ends_with(names.suffix); });
  const auto is_there = [&](const std::string& name) {
    return std::ranges::find(choice.files, name, &ObjectInfo::name) != choice.files.end();
  };
  if (options.rank) {
    choose_rank(*options.rank, names, store, choice);
    return choice;
  }
  if (!options.ignore_index) choice.index = find_index(choice.near, names, store);
  if (choice.index.empty()) {
    choose_files(names, store, choice);
  } else if (const std::string single = single_of(choice.index); is_there(single)) {
    require_one(choice.index, single, store);
  }
  return choice;
}

}  // namespace tessera
