#include "checkpoint/open/set_choice.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>
#include <utility>

#include "base/text.h"
#include "checkpoint/open/directory.h"
#include "checkpoint/read/guard.h"
#include "storage/storage.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera {
namespace {

using Files = std::vector<ObjectInfo>;

// What vLLM saves of each rank, in parts: model-rank-0-part-1.safetensors. All ranks' files have
// the same names of tensors.
constexpr std::string_view kRankPrefix = "model-rank-", kPart = "-part-";
constexpr std::size_t kGap = 1000;

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

// What a Mac leaves beside each file, "._w.safetensors". A pattern such as *.safetensors does not
// take it either.
bool is_hidden(std::string_view name) {
  return name.starts_with('.');
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
void choose_rank(const OpenOptions& options, const SetNames& names, const Store& store,
                 SetChoice& choice) {
  const int rank = *options.rank;
  if (rank < 0) {
    throw Error(ErrorCode::invalid_argument, "there is no rank " + std::to_string(rank))
        .at_path(store.name());
  }
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
  std::vector<std::string> missing;
  int next = 0;
  for (const ObjectInfo& file : own) {
    const int part = rank_part_of(file.name, names)->part;
    // Of a number far off the first few say enough.
    for (; next < part && missing.size() < kGap; ++next) {
      missing.push_back(std::string(kRankPrefix) + std::to_string(rank) + std::string(kPart) +
                        std::to_string(next) + std::string(names.suffix));
    }
    next = part + 1;
  }
  if (!missing.empty()) {
    pass_over(missing,
              "parts of rank " + std::to_string(rank) + " are missing, the first is " + missing[0],
              store, options, choice);
  }
  move_aside(choice.files, std::move(own), "not of rank " + std::to_string(rank), choice);
}

// Of files without an index.
void choose_files(const SetNames& names, const Store& store, SetChoice& choice) {
  const auto is_of_rank = [&](const ObjectInfo& file) {
    return rank_part_of(file.name, names).has_value();
  };
  const auto is_own_form = [](const ObjectInfo& file) { return !is_other_form(file.name); };
  const auto is_shown = [](const ObjectInfo& file) { return !is_hidden(file.name); };
  if (Files shown = those(choice.files, is_shown); !shown.empty())
    move_aside(choice.files, std::move(shown), "a hidden file", choice);
  for (const std::string_view name : {names.usual, names.others[0], names.others[1]}) {
    Files own = those(choice.files, [name](const ObjectInfo& file) { return file.name == name; });
    if (own.empty()) continue;
    const char* const what = is_other_form(name) ? " is the adapter" : " is the model";
    return move_aside(choice.files, std::move(own), std::string(name) + what, choice);
  }
  if (std::ranges::any_of(choice.files, is_of_rank)) {
    throw Error(ErrorCode::unsupported,
                "a sharded state of vLLM; its files do not say how tensors are cut: --rank R reads "
                "what one rank has")
        .at_path(store.name());
  }
  if (Files own = those(choice.files, is_own_form); !own.empty())
    move_aside(choice.files, std::move(own), kBeside, choice);
}

// Digests tell of files that were there.
void require_lacked(const Store& store, const OpenOptions& options, SetChoice& choice) {
  NearObjects objects(store, choice.near);
  const std::vector<std::string> lacked = lacked_files(store, objects);
  if (lacked.empty()) return;
  pass_over(
      lacked,
      "the file " + printable(lacked[0], 200) + " is missing; it was there when digests were made",
      store, options, choice);
}

// What indices name that are ignored, and is not here.
std::set<std::string> named_and_away(const Files& near, const SetNames& names, const Store& store) {
  std::set<std::string> away;
  NearObjects objects(store, near);
  const bool has_own = has_own_form(near, names);
  for (const ObjectInfo& index : near) {
    if (!index.name.ends_with(names.index_suffix) || (has_own && is_other_form(index.name)))
      continue;
    try {
      for (const auto& [tensor, file] : read_set_index(store, index.name).files)
        if (objects.find(file) == nullptr) away.insert(file);
    } catch (const Error&) {
      continue;  // what is wrong with it is ignored, too
    }
  }
  return away;
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

bool is_other_form(std::string_view name) {
  constexpr std::array<std::string_view, 2> kForms{"consolidated", "adapter_model"};
  return std::ranges::any_of(kForms, [name](std::string_view form) {
    if (!name.starts_with(form)) return false;
    const std::string_view rest = name.substr(form.size());
    return rest.starts_with('.') || rest.starts_with('-');
  });
}

bool has_own_form(const std::vector<ObjectInfo>& files, const SetNames& names) {
  return std::ranges::any_of(files, [&names](const ObjectInfo& file) {
    return file.name.find('/') == std::string::npos && !is_hidden(file.name) &&
           !is_other_form(file.name) &&
           (file.name.ends_with(names.suffix) || file.name.ends_with(names.index_suffix));
  });
}

void pass_over(const std::vector<std::string>& missing, const std::string& what, const Store& store,
               const OpenOptions& options, SetChoice& choice) {
  if (!options.partial) {
    throw Error(ErrorCode::incomplete, what + "; --partial takes what is there")
        .at_path(store.name());
  }
  choice.missing.insert(missing.begin(), missing.end());
}

void remark_missing(const MissingFiles& missing, Checkpoint& checkpoint) {
  for (const auto& [name, source] : missing)
    checkpoint.remarks.push_back(missing_row(name, "other files, digests or an index tell of it"));
}

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
    choose_rank(options, names, store, choice);
    require_lacked(store, options, choice);
    return choice;
  }
  if (options.ignore_index) {
    choice.ignored = named_and_away(choice.near, names, store);
  } else {
    choice.index = find_index(choice.near, names, store);
  }
  const bool has_own = has_own_form(choice.near, names);
  for (const ObjectInfo& file : choice.near) {
    if (has_own && is_other_form(file.name) && file.name.ends_with(names.index_suffix))
      choice.remarks.push_back({file.name, FileState::not_part, kBeside, file.size});
  }
  if (choice.index.empty()) {
    choose_files(names, store, choice);
    require_lacked(store, options, choice);
  } else if (const std::string single = single_of(choice.index); is_there(single)) {
    require_one(choice.index, single, store);
  }
  return choice;
}

}  // namespace tessera
