#include "cli/commands.h"

namespace tessera::cli {

void add_common(CLI::App& command, Common& common) {
  command.add_flag("--json", common.json, "machine-readable output");
  command.add_flag("--quiet", common.quiet, "no progress");
}

}  // namespace tessera::cli
