#include "checkpoint/open/kinds.h"
#include "checkpoint/read/select.h"
#include "cli/commands.h"
#include "tessera/error.h"

namespace tessera::cli {

void add_common(CLI::App& command, Common& common) {
  command.add_flag("--json", common.json, "print machine-readable output");
  command.add_flag("--quiet", common.quiet, "show no progress");
}

void add_local_cache(CLI::App& command, Common& common) {
  command.add_option("--local-cache", common.cache.directory,
                     "directory that keeps what is read of URLs, for the next time");
  as_size(command
              .add_option("--cache-size", common.cache.most_bytes,
                          "what it may grow to, as 20GB; default: 50 GiB")
              ->needs("--local-cache"),
          true);
}

// Checked as text first: what is read of "-1" is a number without a sign.
void as_size(CLI::Option* option, bool decimal) {
  const CLI::AsSizeValue size(decimal);
  const auto bytes = [size](std::string& text) -> std::string {
    const std::string given = text;
    const bool is_number = !text.empty() && text.front() >= '0' && text.front() <= '9';
    const std::string problem = is_number ? size(text) : "";
    const bool is_positive = text.find_first_not_of("0123456789") == std::string::npos &&
                             text.find_first_not_of('0') != std::string::npos;
    if (!problem.empty() || (is_number && is_positive)) return problem;
    return given + " is no size of at least one byte";
  };
  option->transform(CLI::Validator(bytes, "", "size"))->type_name("SIZE");
}

void one_of(CLI::Option* option, const std::vector<std::string>& values) {
  std::string names;
  for (const std::string& value : values) names += (names.empty() ? "" : "|") + value;
  option->check(CLI::IsMember(values).description(""))->type_name(names);
}

void add_open(CLI::App& command, OpenOptions& open) {
  command.add_flag("--part", open.part,
                   "a file of one of several ranks: what it holds itself, as local tensors");
  command.add_flag("--raw", open.raw,
                   "torch.save: whole modules as they were pickled; default: their state dicts");
}

Checkpoint opened(const std::string& path, const OpenOptions& options) {
  Checkpoint checkpoint = Checkpoint::open(path, options);
  require_used(options, checkpoint);
  return checkpoint;
}

void add_only(CLI::App& command, std::vector<std::string>& only) {
  command.add_option(
      "--only", only,
      "model, optim, a name or its beginning before a dot, or a glob; may be repeated");
}

void keep_only(Checkpoint& checkpoint, const std::vector<std::string>& only) {
  if (only.empty()) return;
  checkpoint.leaves = select(checkpoint.leaves, only, checkpoint.path);
  checkpoint.files.clear();  // those that tensors lie in are known by their pieces
}

}  // namespace tessera::cli
