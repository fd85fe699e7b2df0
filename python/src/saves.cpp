#include "saves.h"

#include <memory>
#include <string>
#include <utility>

#include "groups.h"
#include "jobs.h"
#include "reports.h"
#include "tessera/checkpoint.h"
#include "tessera/convert.h"
#include "tessera/error.h"
#include "tessera/io.h"
#include "text.h"
#include "trees.h"

namespace tessera::python {
namespace {

IfDiffers if_differs(const Options& all, const char* name, IfDiffers otherwise) {
  std::string text;
  all.get(name, text);
  if (text.empty()) return otherwise;
  if (text == "refuse") return IfDiffers::refuse;
  if (text == "warn") return IfDiffers::warn;
  if (text == "keep") return IfDiffers::keep;
  throw Error(ErrorCode::invalid_argument,
              std::string(name) + " is 'refuse', 'warn' or 'keep', and not '" + text + "'");
}

// What no save takes: whoever reads its tensor hears of what had failed before.
class Failure final : public ByteSource {
 public:
  explicit Failure(Error error) : error_(std::move(error)) {}
  [[nodiscard]] std::uint64_t size() const override { return 1; }
  void read_at(std::uint64_t /*offset*/, MutableByteView /*out*/) const override {
    throw Error(error_);
  }
  [[nodiscard]] const std::string& name() const override { return name_; }

 private:
  const Error error_;
  const std::string name_ = "a tree that could not be made";
};

ErrorCode code_named(const std::string& name) {
  int number = 0;
  while (to_string(static_cast<ErrorCode>(number)) != name) ++number;
  return static_cast<ErrorCode>(number);
}

Tree failed_tree(nb::handle code, nb::handle message, nb::handle path, nb::handle key) {
  Error error(code_named(text_of(code)), text_of(message));
  if (!path.is_none()) error.at_path(text_of(path));
  if (!key.is_none()) error.at_key(text_of(key));
  Tensor tensor;
  tensor.dtype = DType::uint8;
  tensor.shape = {1};
  const auto storage = std::make_shared<Storage>();
  storage->source = std::make_shared<Failure>(std::move(error));
  storage->size = 1;
  storage->dtype = tensor.dtype;
  tensor.pieces.push_back({whole(tensor.shape), storage, 0, {1}});
  return {Value(std::move(tensor)), {}};
}

// `tree` was made by make_tree(). Its memory stays as it is until the call returns.
nb::dict save(const Tree& tree, nb::handle target, nb::dict given, nb::handle carrier,
              nb::object progress) {
  const std::string to = place_of(target);
  SaveOptions options = save_options(Options(std::move(given)));
  const std::unique_ptr<Group> group = group_of(carrier);
  return dict_of(run_job(std::move(progress), [&](Job& job) {
    options.progress = job.progress();
    options.stop = job.stop();
    return tessera::save(tree.value, to, options, *group);
  }));
}

}  // namespace

SaveOptions save_options(const Options& all) {
  SaveOptions options;
  std::string kind;
  all.get("kind", kind);
  if (!kind.empty()) options.kind = kind_named(kind);
  all.get("overwrite", options.overwrite);
  all.get("single_writer", options.single_writer);
  all.get("threads", options.threads);
  all.get("one_file_an_item", options.one_file_an_item);
  all.get("keep_duplicates", options.keep_duplicates);
  options.values = if_differs(all, "values", options.values);
  options.copies = if_differs(all, "copies", options.copies);
  all.get("same_optimizer", options.same_optimizer);
  return options;
}

void bind_saves(nb::module_& module) {
  nb::class_<Tree>(module, "Tree");
  module.def("failed_tree", failed_tree, nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none());
  module.def("make_tree", tree_of, nb::arg().none(), nb::arg());
  module.def("save", save, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none());
}

}  // namespace tessera::python
