#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>

#include <fmt/format.h>

#include "checkpoint/background/process.h"
#include "checkpoint/open/directory.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/read/select.h"
#include "cli/commands.h"
#include "cli/json_value.h"
#include "cli/output.h"
#include "storage/posix/system.h"
#include "tessera/error.h"
#include "tessera/library.h"
#include "tessera/run_directory.h"

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

void add_choice(CLI::App& command, OpenOptions& open) {
  command.add_flag("--ignore-index", open.ignore_index,
                   "a set with an index: go by what the files say");
  one_of(one_each(command.add_option("--accept", open.accept,
                                     "a fault to pass over: bytes behind the last tensor of a "
                                     "safetensors or GGUF file, or behind the end of one of "
                                     "torch.save")),
         {"trailing-bytes"});
}

void add_presence(CLI::App& command, OpenOptions& open) {
  command.add_flag("--partial", open.partial,
                   "leave out what lies in files that are missing; default: it is an error to ask "
                   "for it");
  command
      .add_option("--rank", open.rank,
                  "files that ranks wrote under the same names (vLLM): those of this rank")
      ->check(CLI::Range(0, 1 << 20));
  add_choice(command, open);
}

void add_open(CLI::App& command, OpenOptions& open) {
  add_presence(command, open);
  command.add_flag("--part", open.part,
                   "a file of one of several ranks: what it holds itself, as local tensors");
  command.add_flag("--raw", open.raw,
                   "torch.save: whole modules as they were pickled; default: their state dicts");
}

void refuse_run(const std::string& path, const Error& error) {
  std::vector<RunCheckpoint> run;
  try {
    run = run_checkpoints(path);
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the first error says more
  }
  if (run.empty()) throw Error(error);
  const auto name_of = [](const RunCheckpoint& one) {
    return run_checkpoint_name(one.step, one.unsharded);
  };
  std::string names = name_of(run.front());
  if (run.size() > 1) names += " (the newest) to " + name_of(run.back());
  throw Error(ErrorCode::not_found, "this is a run of " + counted(run.size(), "checkpoint") +
                                        ", not a checkpoint; name one of them: " + names)
      .at_path(path);
}

Checkpoint opened(const std::string& path, const OpenOptions& options) {
  Checkpoint checkpoint;
  try {
    checkpoint = Checkpoint::open(path, options);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::not_found) throw;
    refuse_run(path, error);
  }
  require_used(options, checkpoint);
  return checkpoint;
}

void add_threads(CLI::App& command, int& threads) {
  command.add_option("--threads", threads, "number of threads")->check(CLI::Range(1, 1024));
}

void add_only(CLI::App& command, std::vector<std::string>& only) {
  one_each(command.add_option(
      "--only", only,
      "a name, its beginning before a dot, or a glob, as ls prints it; model and optim are the "
      "parts of a training, and in a file without such parts model is all but the optimizer's; "
      "may be repeated"));
}

// CLI11 would take words behind the value too, and a value in brackets for a list.
CLI::Option* one_each(CLI::Option* option) {
  return option->allow_extra_args(false);
}

void print_notes(const std::vector<std::string>& notes) {
  for (const std::string& text : notes) complain("note: " + text);
}

void refuse_to_replace(const Error& error, bool wants_file) {
  std::error_code none;
  const bool is_file = std::filesystem::is_regular_file(error.path(), none);
  if (error.code() != ErrorCode::already_exists || (is_file && !wants_file)) return;
  throw Error(error.code(), error.message() + "; --overwrite replaces a checkpoint")
      .at_path(error.path());
}

void keep_only(Checkpoint& checkpoint, const std::vector<std::string>& only) {
  if (only.empty()) return;
  Selection chosen = select(checkpoint.leaves, only, checkpoint.path);
  print_notes(chosen.notes);
  checkpoint.leaves = std::move(chosen.leaves);
  checkpoint.files.clear();  // those that tensors lie in are known by their pieces
}

}  // namespace tessera::cli

namespace {

// tessera: inspects, checks, compares and converts checkpoints.

using namespace tessera;       // NOLINT(google-build-using-namespace): this is the program
using namespace tessera::cli;  // NOLINT(google-build-using-namespace)

constexpr const char* kMainExamples = R"(
Examples:
  tessera ls checkpoint/                         one line per tensor
  tessera cat checkpoint/ 'model.w[0:2,:3]'      values of a tensor
  tessera map checkpoint/                        which file holds which piece
  tessera stats checkpoint/                      NaN, Inf, range, mean, norm of each tensor
  tessera scan downloaded.pt                     what its pickles mention
  tessera verify checkpoint/                     check structure, coverage, checksums
  tessera seal checkpoint/                       add digests to what PyTorch wrote
  tessera convert checkpoint/ model.safetensors  one file, streamed in bounded memory
  tessera convert model.pt checkpoint/ --to dcp  a distributed checkpoint
  tessera unshard step1000/ step1000-unsharded/  model.pt, optim.pt, train.pt, config.yaml
  tessera reshard step1000/ step1000-on-8/ --ranks 8
  tessera copy run/step1000 s3://bucket/step1000 byte for byte, the marker last
  tessera gc run/                                what killed writers left
  tessera diff checkpoint/ model.safetensors     by name, bit for bit
  tessera ls s3://bucket/run/step1000            a URL wherever there is a path
  tessera ls hf://org/model                      of the Hugging Face Hub, headers only

With --json a failure is also printed as {"error": {"code": ..., "message": ..., "path": ...}}.
Exit codes: 0 done; 1 the answer is no (verify, scan, diff, stats); 2 wrong usage; 3 failed.)";

// A failure: a line for people, and with --json a document for programs. Returns the exit code.
int report(const Error& error, bool json) {
  if (json) print_json(json_of(error));
  complain(error.what());
  return error.code() == ErrorCode::invalid_argument ? kUsage : kFailed;
}

bool asks_for_json(int argc, char** argv) {
  return std::any_of(argv, argv + argc,
                     [](const char* word) { return std::string_view(word) == "--json"; });
}

// Throws when the first word is no command.
void require_command(const CLI::App& app, int argc, char** argv) {
  if (argc >= 2 && argv[1][0] != '-') (void)command_named(app, argv[1]);
}

// Words that no option or place takes, in their order.
std::string unexpected(const CLI::App& app) {
  std::string words;
  for (const std::string& word : app.remaining(true)) words += (words.empty() ? "" : " ") + word;
  return "unexpected: " + words;
}

// What CLI11 throws of a command line: it asks for help or the version, or it is wrong.
int report_usage(const CLI::App& app, const CLI::ParseError& error, bool json) {
  std::ostringstream out, none;
  if (app.exit(error, out, none) == 0) {
    fmt::print("{}", out.str());
    return kDone;
  }
  const bool is_rest = dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr;
  std::string text = is_rest ? unexpected(app) : error.what();
  const auto chosen = app.get_subcommands();
  text += "; tessera " + (chosen.empty() ? "" : chosen.front()->get_name() + " ") + "--help";
  return report(Error(ErrorCode::invalid_argument, text), json);
}

// A cache that nothing goes through would be a slip in silence.
void require_url(const CLI::App& command) {
  const auto is_url = [](const CLI::Option* option) {
    return option->get_positional() &&
           std::ranges::any_of(option->results(), [](const std::string& text) {
             return text.find("://") != std::string::npos && !text.starts_with("file:");
           });
  };
  if (std::ranges::any_of(command.get_options(), is_url)) return;
  throw Error(ErrorCode::invalid_argument, "--local-cache has no effect: nothing is read of a URL");
}

int run(int argc, char** argv) {
  CLI::App app{"Inspects, checks, compares and converts checkpoints of PyTorch", "tessera"};
  app.footer(kMainExamples);
  app.set_version_flag("--version", "tessera " + std::string(version()));
  app.require_subcommand(1);
  Common common;
  Action action;
  add_ls(app, common, action);
  add_stat(app, common, action);
  add_cat(app, common, action);
  add_map(app, common, action);
  add_stats(app, common, action);
  add_verify(app, common, action);
  add_scan(app, common, action);
  add_seal(app, common, action);
  add_diff(app, common, action);
  add_convert(app, common, action);
  add_copy(app, common, action);
  add_gc(app, common, action);
  add_unshard(app, common, action);
  add_reshard(app, common, action);
  add_completion(app, action);
  add_help(app, action);
  if (argc == 1) {
    fmt::print("{}", app.help());
    return kUsage;
  }
  require_command(app, argc, argv);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return report_usage(app, error, asks_for_json(argc, argv));
  }
  if (!common.cache.directory.empty()) {
    require_url(*app.get_subcommands().front());
    use_local_cache(common.cache);
  }
  try {
    return action();
  } catch (const Error& error) {
    throw without_offers(error, [&app](const std::string& option) {
      return app.get_subcommands().front()->get_option_no_throw(option) != nullptr;
    });
  }
}

// Runs the command and reports what went wrong. Throws only where the answer cannot be printed.
int answer(int argc, char** argv) {
  const bool json = asks_for_json(argc, argv);
  try {
    return run(argc, argv);
  } catch (const Error& error) {
    return report(error, json);
  } catch (const std::bad_alloc&) {
    return report(Error(ErrorCode::limit, "out of memory"), json);
  } catch (const std::exception& error) {
    if (std::ferror(stdout) != 0) throw;
    return report(Error(ErrorCode::io, error.what()), json);
  }
}

// A descriptor 0, 1 or 2 that the caller closed would be the next file that is opened, and what is
// printed would go into it. It becomes one that cannot be used.
void keep_standard_descriptors() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(fd, F_GETFD) < 0)
      (void)!::open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

// Every answer leaves through here: one that did not arrive is a failure, whatever it said.
int delivered(int argc, char** argv) {
  int reason = 0;
  try {
    const int code = answer(argc, argv);
    errno = 0;
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
    reason = errno;
  } catch (const std::system_error& error) {  // fmt's
    reason = error.code().value();
  }
  const ErrorCode code = error_code_of(reason);
  const std::string why = reason == 0 ? "" : ": " + std::generic_category().message(reason);
  complain(Error(code, "the answer could not be written" + why).at_path("standard output").what());
  return kFailed;
}

}  // namespace

int main(int argc, char** argv) {
  keep_standard_descriptors();
  std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow (ulimit -f) fails with EFBIG then
  // No command of people: what a CheckpointWriter starts. The number is a connection's descriptor.
  if (argc == 3 && std::string_view(argv[1]) == "writer")
    return run_writer_process(std::atoi(argv[2]));
  return delivered(argc, argv);
}
