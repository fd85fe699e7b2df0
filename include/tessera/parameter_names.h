// Names of parameters that changed between two versions of a model, as rules that callers extend:
// how the name that a checkpoint has for a parameter leads to the one that a model has now.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace [[gnu::visibility("default")]] tessera {

// A parameter that was renamed, or several that were made of one.
struct NameRule {
  // What a checkpoint calls it. One `*` at most, which stands for any text, dots too.
  std::string stored;
  // What a model calls it, or each of them. The text of `*` is put into theirs.
  std::vector<std::string> live;
};

// Blocks stand in one list, as `list.N.REST`, or in groups of some size, as `groups.G.I.REST`,
// where N is G times the size, and I. The size is taken from the names.
struct BlockRule {
  std::string list;
  std::string groups;
};

struct NameRules {
  std::vector<std::string> wrappers;  // text that is removed from names, wherever it stands
  std::vector<BlockRule> blocks;
  std::vector<NameRule> renamed;
};

// What OLMo does when it restores: it removes "_fsdp_wrapped_module." (so a name that only ends in
// the word keeps it), makes `attn_norm` and `ff_norm` of a block's `norm`, and finds
// "transformer.blocks" in "transformer.block_groups" and the other way round.
[[nodiscard]] NameRules olmo_name_rules();

// `name` without the wrappers.
[[nodiscard]] std::string without_wrappers(std::string name, const NameRules& rules);

// The stored name for each live one that has one: the same name, or else that of another grouping
// of blocks, or else what the first rule that fits leads to. One stored name may serve several live
// ones. Both are compared without wrappers; the result has the names as they were given. Throws
// `conflict` for two stored names that become one, `invalid_argument` for a rule with several `*`.
[[nodiscard]] std::map<std::string, std::string> match_names(const std::vector<std::string>& stored,
                                                             const std::vector<std::string>& live,
                                                             const NameRules& rules);

}  // namespace tessera
