#include "data_files.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <stop_token>
#include <variant>
#include <vector>

#include "ending.h"
#include "jobs.h"
#include "tensors.h"
#include "tessera/data_files.h"
#include "tessera/error.h"
#include "tessera/tensor_view.h"
#include "text.h"

namespace tessera::python {
namespace {

// An item to be: a tensor, or the bytes of an archive.
using Content = std::variant<Tensor, ByteView>;

ByteView view_of(nb::handle given) {
  const auto bytes = nb::borrow<nb::bytes>(given);
  return {static_cast<const std::byte*>(bytes.data()), bytes.size()};
}

// (address, dtype, shape, strides), whose memory the caller keeps, or bytes.
Content content_of(nb::handle given) {
  if (!PyTuple_Check(given.ptr())) return view_of(given);
  const auto tuple = nb::borrow<nb::tuple>(given);
  const auto* const address = reinterpret_cast<const void*>(nb::cast<std::uintptr_t>(tuple[0]));
  return ConstTensorView::of(address, dtype_from_torch(text_of(tuple[1])), shape_of(tuple[2]),
                             shape_of(tuple[3]))
      .tensor();
}

std::uint64_t size_of_content(const Content& content) {
  if (const auto* const bytes = std::get_if<ByteView>(&content)) return bytes->size();
  const Tensor& tensor = std::get<Tensor>(content);
  return byte_size(tensor.dtype, tensor.shape);
}

class File {
 public:
  File(nb::object directory, nb::object name) {
    const std::string where = place_of(directory);
    const std::string as = path_of(name);
    file_.emplace(run_job(nb::none(), [&](Job&) { return DataFileWriter(where, as); }));
  }

  // The place of each item: [(offset, length)].
  nb::list write(nb::handle items) {
    std::vector<Content> contents;
    std::uint64_t bytes = 0;
    for (const nb::handle item : items) {
      contents.push_back(content_of(item));
      bytes += size_of_content(contents.back());
    }
    std::vector<ItemExtent> places;
    if (bytes < kQuick) {
      places = without_lock([&] { return write_all(contents, stop_.get_token()); });
    } else {
      places = run_job(nb::none(), [&](Job& job) {
        const std::stop_callback ends(job.stop(), [this] { stop_.request_stop(); });
        return write_all(contents, stop_.get_token());
      });
    }
    nb::list list;
    for (const ItemExtent& place : places) list.append(nb::make_tuple(place.offset, place.length));
    return list;
  }

  nb::tuple finish() {
    const DataFileReceipt receipt = run_job(nb::none(), [this](Job&) { return file_->finish(); });
    return nb::make_tuple(string_of(receipt.name), receipt.size, receipt.tail,
                          string_of(receipt.writer));
  }

  // Nothing is left of a file that was not finished.
  void drop() { file_.reset(); }
  void stop() { stop_.request_stop(); }

 private:
  std::vector<ItemExtent> write_all(const std::vector<Content>& contents,
                                    const std::stop_token& stop) {
    std::vector<ItemExtent> places;
    for (const Content& content : contents) {
      if (const auto* const bytes = std::get_if<ByteView>(&content))
        places.push_back(file_->archive(*bytes));
      else
        places.push_back(file_->tensor(std::get<Tensor>(content), stop));
    }
    return places;
  }

  std::optional<DataFileWriter> file_;
  std::stop_source stop_;
};

class Directory {
 public:
  Directory(nb::object path, bool overwrite, bool single_writer) {
    const std::string where = place_of(path);
    directory_ = run_job(nb::none(), [&](Job&) {
      return std::make_unique<DcpDirectory>(where, DcpDirectoryOptions{overwrite, single_writer});
    });
  }

  // Each receipt is what `File::finish` gave.
  void commit(nb::handle metadata, nb::handle save_id, nb::handle receipts) {
    const ByteView bytes = view_of(metadata);
    std::vector<DataFileReceipt> files;
    for (const nb::handle given : receipts) {
      const auto receipt = nb::cast<nb::tuple>(given);
      files.push_back({text_of(receipt[0]), nb::cast<std::uint64_t>(receipt[1]),
                       nb::cast<std::uint64_t>(receipt[2]), text_of(receipt[3])});
    }
    const std::string id = text_of(save_id);
    run_job(nb::none(), [&](Job& job) { directory_->commit(bytes, id, files, job.stop()); });
  }

  // Another save may begin.
  void close() { directory_.reset(); }

 private:
  std::unique_ptr<DcpDirectory> directory_;
};

nb::object step_of(const PathPart& part) {
  if (const auto* const index = std::get_if<std::int64_t>(&part)) return nb::int_(*index);
  return string_of(step_text(part));
}

nb::object steps_of(const std::optional<Path>& path) {
  if (!path) return nb::none();
  nb::list steps;
  for (const PathPart& part : *path) steps.append(step_of(part));
  return nb::tuple(steps);
}

// (file, offset, length, transforms or None)
nb::tuple described(const DcpItem& item) {
  nb::object transforms = nb::none();
  if (!item.transforms.empty()) {
    nb::list texts;
    for (const std::string& text : item.transforms) texts.append(string_of(text));
    transforms = texts;
  }
  return nb::make_tuple(string_of_path(item.file), item.extent.offset, item.extent.length,
                        transforms);
}

// (name, path or None, None, [item]) of a value; a tensor has (dtype, shape, requires_grad) instead
// of None, and (offsets, sizes, item) for each chunk.
nb::tuple described(const DcpEntry& entry) {
  nb::list parts;
  nb::object tensor = nb::none();
  if (entry.dtype) {
    tensor = nb::make_tuple(name_of(*entry.dtype), tuple_of(entry.shape), entry.requires_grad);
    for (std::size_t i = 0; i < entry.chunks.size(); ++i) {
      const Box& box = entry.chunks[i];
      parts.append(
          nb::make_tuple(tuple_of(box.offsets), tuple_of(box.sizes), described(entry.items[i])));
    }
  } else {
    for (const DcpItem& item : entry.items) parts.append(described(item));
  }
  return nb::make_tuple(string_of(entry.name), steps_of(entry.path), tensor, parts);
}

// (version, checkpoint_id, save_id, whether there are paths, entries); an empty text is None.
nb::tuple metadata_of(nb::handle bytes, nb::handle path) {
  const ByteView view = view_of(bytes);
  const std::string where = path_of(path);
  const DcpMetadata metadata = run_job(nb::none(), [&](Job&) {
    try {
      return decode_dcp_metadata(view);
    } catch (Error& error) {
      error.at_path(where);
      throw;
    }
  });
  nb::list entries;
  for (const DcpEntry& entry : metadata.entries) entries.append(described(entry));
  return nb::make_tuple(string_or_none(metadata.version), string_or_none(metadata.checkpoint_id),
                        string_or_none(metadata.save_id), metadata.has_paths, entries);
}

}  // namespace

void bind_data_files(nb::module_& module) {
  module.def("new_attempt", [] { return string_of(new_attempt()); });
  module.def("dcp_metadata", metadata_of);
  nb::class_<File>(module, "DataFile")
      .def(nb::init<nb::object, nb::object>())
      .def("write", &File::write)
      .def("finish", &File::finish)
      .def("drop", &File::drop)
      .def("stop", &File::stop);
  nb::class_<Directory>(module, "DcpDirectory")
      .def(nb::init<nb::object, bool, bool>())
      .def("commit", &Directory::commit)
      .def("close", &Directory::close);
}

}  // namespace tessera::python
