#include "checkpoints.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <utility>

#include "ending.h"
#include "jobs.h"
#include "options.h"
#include "reports.h"
#include "tensors.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "text.h"
#include "trees.h"
#include "values.h"

namespace tessera::python {
namespace {

constexpr std::uint64_t kLargestFile = std::uint64_t{4} << 30U;  // bytes of one that is read whole

using Shared = std::shared_ptr<Opened>;

Shared opened(nb::object path, nb::dict given) {
  const std::string where = place_of(path);
  OpenOptions options = open_options(Options(std::move(given)));
  return run_job(nb::none(), [&](Job& job) {
    options.stop = job.stop();
    return std::make_shared<Opened>(Checkpoint::open(where, options));
  });
}

std::vector<std::string> texts_of(nb::handle strings) {
  std::vector<std::string> texts;
  for (const nb::handle string : strings) texts.push_back(text_of(string));
  return texts;
}

template <typename Texts>
nb::list strings_of(const Texts& texts) {
  nb::list strings;
  for (const std::string& text : texts) strings.append(string_of(text));
  return strings;
}

nb::list names(const Opened& self) {
  nb::list names;
  const auto checkpoint = self.checkpoint();
  for (const Leaf& leaf : checkpoint->leaves) names.append(string_of(leaf.name));
  return names;
}

nb::list matching(const Opened& self, nb::handle glob) {
  return strings_of(self.checkpoint()->names(text_of(glob)));
}

bool has(const Opened& self, nb::handle name) {
  return self.checkpoint()->find(text_of(name)) != nullptr;
}

// A value whose tensors are in memory: they have no names by which they could be read later.
Value loaded(const Checkpoint& checkpoint, const std::string& name) {
  const Checkpoint alone = checkpoint.map([&](Leaf leaf) -> std::optional<Leaf> {
    if (leaf.name != name) return std::nullopt;
    return Leaf{name, {name}, std::move(leaf.value)};
  });
  return run_job(nb::none(), [&](Job& job) {
    LoadOptions options;
    options.stop = job.stop();
    return alone.load(options).at(name);
  });
}

// None, or a tuple of the `_core.Tensor` or the value. `wrap` is for tensors inside of a value.
nb::object leaf(const Opened& self, nb::handle given, nb::object wrap) {
  const auto checkpoint = self.checkpoint();
  const std::string name = text_of(given);
  const Leaf* leaf = checkpoint->find(name);
  if (leaf == nullptr) return nb::none();
  if (leaf->value.is(Value::Kind::tensor))
    return nb::make_tuple(nb::cast(TensorHandle(leaf->value)));
  const Value value = holds_tensors(leaf->value) ? loaded(*checkpoint, name) : leaf->value;
  return nb::make_tuple(object_of(value, std::move(wrap)));
}

Shared only(const Opened& self, nb::handle keys) {
  return std::make_shared<Opened>(self.checkpoint()->only(texts_of(keys)), self);
}

Shared share(const Opened& self) {
  (void)self.checkpoint();  // it is open
  return std::make_shared<Opened>(self);
}

// One request is (name, None or (offsets, sizes), address, dtype, shape, strides). Whoever calls
// keeps the memory until the call returns.
ReadRequest request_of(nb::handle given) {
  const auto tuple = nb::cast<nb::tuple>(given);
  auto* const address = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(tuple[2]));
  ReadRequest request{text_of(tuple[0]),
                      TensorView::of(address, dtype_from_torch(text_of(tuple[3])),
                                     shape_of(tuple[4]), shape_of(tuple[5]))};
  if (!tuple[1].is_none()) {
    const auto box = nb::cast<nb::tuple>(tuple[1]);
    request.slice = Box{shape_of(box[0]), shape_of(box[1])};
  }
  return request;
}

nb::dict read(const Opened& self, nb::handle requests, int threads, std::uint64_t memory) {
  const auto checkpoint = self.checkpoint();
  std::vector<ReadRequest> all;
  std::uint64_t bytes = 0;
  for (const nb::handle request : requests) {
    all.push_back(request_of(request));
    bytes += byte_size(all.back().to.dtype(), all.back().to.shape());
  }
  ReadOptions options;
  options.threads = threads;
  options.memory = memory;
  const bool is_near = checkpoint->store == nullptr || checkpoint->store->has_directories();
  if (bytes < kQuick && is_near) {
    return dict_of(without_lock([&] { return checkpoint->read_many(all, options); }));
  }
  return dict_of(run_job(nb::none(), [&](Job& job) {
    options.stop = job.stop();
    return checkpoint->read_many(all, options);
  }));
}

// The tree of a checkpoint with memory for its tensors, the floating ones of 16 bits and more as
// `dtype`.
Value tree_as(const Checkpoint& checkpoint, DType dtype) {
  std::map<const void*, Value> made;  // by node
  const auto fresh = [&](Leaf leaf) -> std::optional<Leaf> {
    if (!leaf.value.is(Value::Kind::tensor)) return leaf;
    const auto [found, is_new] = made.try_emplace(leaf.value.identity());
    if (is_new) {
      Tensor tensor = leaf.value.as_tensor();
      if (info(tensor.dtype).floating && size_of(tensor.dtype) > 1) tensor.dtype = dtype;
      auto storage = std::make_shared<Storage>();
      storage->size = byte_size(tensor.dtype, tensor.shape);
      storage->dtype = tensor.dtype;
      const std::shared_ptr<std::byte[]> bytes(new std::byte[storage->size]);
      storage->data = bytes.get();
      storage->owner = bytes;
      tensor.pieces = {
          Piece{.slice = whole(tensor.shape), .storage = std::move(storage), .strides = {}}};
      found->second = Value(std::move(tensor));
    }
    leaf.value = found->second;
    return leaf;
  };
  return checkpoint.map(fresh).tree();
}

// The `_core.Tensor` over its mapped file, or None: its elements have to be read.
nb::object mapped(const Opened& self, nb::handle given) {
  const auto checkpoint = self.checkpoint();
  const auto files = self.files();
  const std::string name = text_of(given);
  std::optional<Tensor> view =
      without_lock([&] { return files->view(checkpoint->tensor(name), name); });
  return view ? nb::cast(TensorHandle(Value(std::move(*view)))) : nb::none();
}

// With `map` what is not converted are views of mapped files, where there can be any.
nb::object load(const Opened& self, nb::handle dtype, int threads, bool map, nb::object wrap,
                nb::object progress) {
  const auto checkpoint = self.checkpoint();
  std::optional<DType> wanted;
  if (!dtype.is_none()) wanted = dtype_from_torch(text_of(dtype));
  const Value tree = run_job(std::move(progress), [&](Job& job) {
    LoadOptions options;
    options.threads = threads;
    options.map = map;
    options.progress = job.progress();
    options.stop = job.stop();
    if (!wanted) return checkpoint->load(options);
    Value cast = tree_as(*checkpoint, *wanted);
    (void)tessera::load(cast, *checkpoint, options, *solo_group());
    return cast;
  });
  return object_of(tree, std::move(wrap));
}

// The paths of files that the checkpoint names and that are not there.
std::vector<std::string> missing_paths(const Checkpoint& checkpoint) {
  std::vector<std::string> paths;
  for (const FileRow& row : checkpoint.remarks) {
    if (row.state == FileState::missing) paths.push_back(checkpoint.store->name() + "/" + row.name);
  }
  return paths;
}

// What tells this save from another one in its place: its own name, where the kind has one, or else
// the files with their sizes and versions. A file that is open is known as it was when it was
// opened.
std::map<std::string, std::string> marks_of(const Checkpoint& checkpoint) {
  if (!checkpoint.save_id.empty()) return {{"save", checkpoint.save_id}};
  std::map<std::string, std::string> marks;
  const std::vector<std::string> missing = missing_paths(checkpoint);
  const ByteSource* last = nullptr;  // tensors of one file come one after another
  for (const Leaf& leaf : checkpoint.leaves) {
    if (!leaf.value.is(Value::Kind::tensor)) continue;
    for (const Piece& piece : leaf.value.as_tensor().pieces) {
      const ByteSource* const source = piece.storage ? piece.storage->source.get() : nullptr;
      if (source == nullptr || source == last) continue;
      last = source;
      if (std::ranges::find(missing, source->name()) == missing.end())
        marks.try_emplace(source->name(), source->version());
    }
  }
  for (const ObjectInfo& file : checkpoint.files) {
    const std::string version = marks.empty() ? checkpoint.store->open(file.name)->version() : "";
    marks[file.name] = std::to_string(file.size) + " " + file.version + version;
  }
  for (const std::string& path : missing) marks[path] = "missing";
  return marks;
}

// The identity of all of the checkpoint, whichever part this is.
nb::list identity(const Opened& self) {
  const auto whole = self.whole();
  const auto marks = run_job(nb::none(), [&](Job&) { return marks_of(*whole); });
  nb::list pairs;
  for (const auto& [name, mark] : marks)
    pairs.append(nb::make_tuple(string_of_path(name), string_of(mark)));
  return pairs;
}

nb::list missing(const Opened& self) {
  nb::list paths;
  for (const std::string& path : missing_paths(*self.checkpoint()))
    paths.append(string_of_path(path));
  return paths;
}

nb::list files(const Opened& self) {
  nb::list files;
  for (const ObjectInfo& file : self.checkpoint()->files)
    files.append(nb::make_tuple(string_of_path(file.name), file.size));
  return files;
}

// The bytes of one of its files.
nb::bytes file(const Opened& self, nb::handle name) {
  const auto checkpoint = self.checkpoint();
  const std::string wanted = path_of(name);
  if (std::ranges::find(checkpoint->files, wanted, &ObjectInfo::name) == checkpoint->files.end())
    throw Error(ErrorCode::not_found, "no file of the checkpoint").at_path(wanted);
  const std::vector<std::byte> bytes = run_job(
      nb::none(), [&](Job&) { return read_all(*checkpoint->store->open(wanted), kLargestFile); });
  return nb::bytes(bytes.data(), bytes.size());
}

nb::dict metadata(const Opened& self) {
  nb::dict metadata;
  for (const auto& [key, text] : self.checkpoint()->metadata)
    metadata[string_of(key)] = string_of(text);
  return metadata;
}

// The value of an item that torch's reader has read from the file `path`.
nb::object archive_value(const nb::bytes& bytes, nb::handle path, nb::handle key, nb::object wrap) {
  try {
    return object_of(value_of_archive(bytes), std::move(wrap));
  } catch (const Error& error) {
    throw Error(error.code(), error.message()).at_path(path_of(path)).at_key(text_of(key));
  }
}

}  // namespace

void bind_checkpoints(nb::module_& module) {
  nb::class_<Opened>(module, "Checkpoint")
      .def("close", &Opened::close)
      .def_prop_ro("closed", &Opened::is_closed)
      .def("share", share)
      .def("identity", identity)
      .def_prop_ro("kind",
                   [](const Opened& self) { return string_of(to_string(self.checkpoint()->kind)); })
      .def_prop_ro("path",
                   [](const Opened& self) { return string_of_path(self.checkpoint()->path); })
      .def_prop_ro("producer",
                   [](const Opened& self) { return string_of(self.checkpoint()->producer); })
      .def_prop_ro("save_id",
                   [](const Opened& self) { return string_of(self.checkpoint()->save_id); })
      .def_prop_ro("world_size", [](const Opened& self) { return self.checkpoint()->world_size; })
      .def_prop_ro("has_types", [](const Opened& self) { return self.checkpoint()->has_types; })
      .def_prop_ro("warnings",
                   [](const Opened& self) { return strings_of(self.checkpoint()->warnings); })
      .def_prop_ro("files", files)
      .def_prop_ro("missing", missing)
      .def_prop_ro("metadata", metadata)
      .def("__len__", [](const Opened& self) { return self.checkpoint()->leaves.size(); })
      .def("file", file)
      .def("names", names)
      .def("matching", matching)
      .def("has", has)
      .def("leaf", leaf)
      .def("only", only)
      .def("require_files", [](const Opened& self) { self.checkpoint()->require_files(); })
      .def("read", read, nb::arg("requests"), nb::arg("threads"), nb::arg("memory"))
      .def("mapped", mapped)
      .def("load", load, nb::arg("dtype").none(), nb::arg("threads"), nb::arg("map"),
           nb::arg("wrap"), nb::arg("progress").none());
  module.def("open", opened);
  module.def("archive_value", archive_value);
}

}  // namespace tessera::python
