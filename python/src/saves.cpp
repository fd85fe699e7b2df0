#include "saves.h"

#include "jobs.h"
#include "options.h"
#include "reports.h"
#include "tessera/checkpoint.h"
#include "tessera/kinds.h"
#include "text.h"
#include "trees.h"

namespace tessera::python {
namespace {

nb::dict save(nb::handle tree, nb::handle target, nb::dict given, nb::object describe,
              nb::object progress) {
  const std::string to = path_of(target);
  const Options all(std::move(given));
  SaveOptions options;
  std::string kind;
  all.get("kind", kind);
  if (!kind.empty()) options.kind = kind_named(kind);
  all.get("overwrite", options.overwrite);
  all.get("single_writer", options.single_writer);
  all.get("threads", options.threads);
  const Tree held = tree_of(tree, std::move(describe));
  const SaveResult result = run_job(std::move(progress), [&](Job& job) {
    options.progress = job.progress();
    options.stop = job.stop();
    return tessera::save(held.value, to, options);
  });
  nb::dict dict = dict_of(result);
  dict["files"] = result.files;
  dict["total_bytes"] = result.total_bytes;
  return dict;
}

}  // namespace

void bind_saves(nb::module_& module) {
  module.def("save", save, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
}

}  // namespace tessera::python
