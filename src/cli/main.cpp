// tessera: inspects, checks, compares and converts checkpoints.
#include <cstdio>
#include <exception>
#include <iostream>

#include <fmt/format.h>

#include "cli/commands.h"
#include "tessera/error.h"
#include "value/render.h"

namespace {

using namespace tessera;       // NOLINT(google-build-using-namespace): this is the program
using namespace tessera::cli;  // NOLINT(google-build-using-namespace)

constexpr const char* kExamples = R"(
Examples:
  tessera ls checkpoint/                         one line a tensor
  tessera cat checkpoint/ 'model.w[0:2,:3]'      values of a tensor
  tessera map checkpoint/                        which file holds which piece
  tessera scan downloaded.pt                     what its pickles mention
  tessera verify checkpoint/                     structure, coverage, checksums
  tessera seal checkpoint/                       digests for what PyTorch wrote
  tessera convert checkpoint/ model.safetensors  one file, streamed, bounded memory
  tessera convert model.pt checkpoint/ --to dcp  a distributed checkpoint
  tessera unshard step1000/ step1000-unsharded/  model.pt, optim.pt, train.pt, config.yaml
  tessera reshard step1000/ step1000-on-8/ --ranks 8
  tessera diff checkpoint/ model.safetensors     by name, bit for bit

Exit codes: 0 done; 1 the answer is no (verify, scan, diff); 2 wrong usage; 3 could not.)";

int report(const std::string& line) {
  fmt::print(stderr, "tessera: {}\n", printable(line));
  return kFailed;
}

int run(int argc, char** argv) {
  CLI::App app{"Inspects, checks, compares and converts checkpoints of PyTorch", "tessera"};
  app.footer(kExamples);
  app.set_version_flag("--version", std::string("tessera ") + TESSERA_VERSION);
  app.require_subcommand(1);
  Common common;
  Action action;
  add_ls(app, common, action);
  add_stat(app, common, action);
  add_cat(app, common, action);
  add_map(app, common, action);
  add_verify(app, common, action);
  add_scan(app, common, action);
  add_seal(app, common, action);
  add_diff(app, common, action);
  add_convert(app, common, action);
  add_unshard(app, common, action);
  add_reshard(app, common, action);
  add_completion(app, action);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kDone : kUsage;
  }
  return action();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const Error& error) {
    const int code = report(error.what());
    return error.code() == ErrorCode::invalid_argument ? kUsage : code;
  } catch (const std::bad_alloc&) {
    return report("limit: out of memory");
  } catch (const std::exception& error) {
    return report(std::string("io: ") + error.what());
  }
}
