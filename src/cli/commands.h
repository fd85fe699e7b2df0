// The commands of `tessera`. Each adds itself to the command line; main runs the one that was
// named.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "tessera/checkpoint.h"
#include "tessera/convert.h"
#include "tessera/error.h"
#include "tessera/stores.h"

namespace tessera::cli {

// Exit codes (stable).
inline constexpr int kDone = 0;
inline constexpr int kNo = 1;      // the answer is "no": verify, diff
inline constexpr int kUsage = 2;   // wrong usage
inline constexpr int kFailed = 3;  // could not: damaged input, I/O, unsupported, unsafe

// Options that every command has.
struct Common {
  bool json = false;
  bool quiet = false;
  LocalCache cache = {};  // without a directory there is none
};

// The work of the chosen command; returns the exit code.
using Action = std::function<int()>;

void add_common(CLI::App& command, Common& common);
// The options --local-cache and --cache-size of commands that read.
void add_local_cache(CLI::App& command, Common& common);
// Bytes: the numbers of an option take units, as 64MiB or 20GB; 5K is 5000 where `decimal`.
void as_size(CLI::Option* option, bool decimal);
// Lets an option have one of these values; --help reads a|b|c.
void one_of(CLI::Option* option, const std::vector<std::string>& values);
// The options of commands that open a checkpoint which may not be all there, or not alone.
void add_presence(CLI::App& command, OpenOptions& open);
// Those of them that make sense where a checkpoint is taken as it is, with all of its files.
void add_choice(CLI::App& command, OpenOptions& open);
// These, and the options --part and --raw of commands that open a file.
void add_open(CLI::App& command, OpenOptions& open);
// Throws what opening `path` has thrown; where that is a run, with the names of its checkpoints.
[[noreturn]] void refuse_run(const std::string& path, const Error& error);
// As Checkpoint::open; an option that this checkpoint has no use for is `invalid_argument`.
[[nodiscard]] Checkpoint opened(const std::string& path, const OpenOptions& options);
// An option that may be repeated takes one value each time.
CLI::Option* one_each(CLI::Option* option);
// On standard error, for what a selection may not have meant.
void print_notes(const std::vector<std::string>& notes);

// Throws `already_exists` again, with the option that goes on, if it does; returns otherwise. A
// file does not make room for a directory.
void refuse_to_replace(const Error& error, bool wants_file);
// The option --threads of commands that work on several.
void add_threads(CLI::App& command, int& threads);
// The option --only of commands that look at a part.
void add_only(CLI::App& command, std::vector<std::string>& only);
// Leaves only what it selects in the checkpoint, and of the files only those that it lies in.
void keep_only(Checkpoint& checkpoint, const std::vector<std::string>& only);
void add_ls(CLI::App& app, Common& common, Action& action);
void add_stat(CLI::App& app, Common& common, Action& action);
void add_stats(CLI::App& app, Common& common, Action& action);
void add_cat(CLI::App& app, Common& common, Action& action);
void add_map(CLI::App& app, Common& common, Action& action);
void add_scan(CLI::App& app, Common& common, Action& action);
void add_completion(CLI::App& app, Action& action);
void add_help(CLI::App& app, Action& action);
// The command that was typed. Throws `invalid_argument` where there is none, with one that is near.
[[nodiscard]] const CLI::App& command_named(const CLI::App& app, const std::string& typed);
void add_verify(CLI::App& app, Common& common, Action& action);
void add_diff(CLI::App& app, Common& common, Action& action);
void add_seal(CLI::App& app, Common& common, Action& action);
void add_copy(CLI::App& app, Common& common, Action& action);
void add_gc(CLI::App& app, Common& common, Action& action);
void add_convert(CLI::App& app, Common& common, Action& action);
void add_unshard(CLI::App& app, Common& common, Action& action);
void add_reshard(CLI::App& app, Common& common, Action& action);

// Options of the commands that convert: threads, memory, overwriting; and how OLMo kinds are laid
// out.
void add_work(CLI::App& command, ConvertOptions& options);
void add_olmo(CLI::App& command, ConvertOptions& options);
// Runs a conversion with a progress bar called `verb`, and prints its report. `convert` is given
// `how` with hooks.
using Conversion = std::function<ConvertReport(const ConvertOptions& how)>;
int run_conversion(const std::string& verb, const Conversion& convert, ConvertOptions how,
                   const Common& common);

}  // namespace tessera::cli
