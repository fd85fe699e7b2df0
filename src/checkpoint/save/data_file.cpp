#include "checkpoint/save/data_file.h"

#include <exception>
#include <utility>

#include "base/stop.h"
#include "checkpoint/dcp/item_writer.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/save/elements.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::size_t kWindow = 1 << 20;  // bytes: stays in the cache between checksum and write

// What `elements` gives, and `meter` hears of the bytes.
ElementSource counted(ElementSource elements, Meter& meter) {
  return [elements = std::move(elements), &meter](std::int64_t begin, std::int64_t count,
                                                  MutableByteView scratch) {
    const ByteView bytes = elements(begin, count, scratch);
    meter.add(bytes.size());
    return bytes;
  };
}

void write_item(ItemWriter& writer, const Leaf& leaf, OwnItem& item, Meter& meter) {
  dcp::Item written;
  if (leaf.value.is(Value::Kind::tensor)) {
    const Tensor& tensor = leaf.value.as_tensor();
    TensorReader reader(tensor, leaf.name);
    written = writer.tensor(tensor.dtype, item.chunk.box.sizes,
                            counted(elements_of(tensor, item.chunk, reader), meter));
  } else {
    written = writer.value(leaf.value);
  }
  if (writer.archive_size() != item.place.length) {
    throw Error(ErrorCode::mismatch, "the item has " + std::to_string(writer.archive_size()) +
                                         " bytes, " + std::to_string(item.place.length) +
                                         " were planned: did the value change?")
        .at_key(leaf.name);
  }
  item.place.offset = written.offset;
  item.place.length = written.length;
}

}  // namespace

std::optional<int> zstd_level(const FileRules& rules) {
  return rules.are_compressed() ? std::optional(rules.level) : std::nullopt;
}

std::string data_file_name(int rank, int file, const std::string& attempt) {
  return "__" + std::to_string(rank) + "_" + std::to_string(file) + "_" + attempt + ".distcp";
}

bool is_data_file_of(std::string_view name, const std::string& attempt) {
  return name.starts_with("__") && name.ends_with("_" + attempt + ".distcp");
}

DataDigest write_data_file(Store& store, const DataFile& file, Meter& meter) {
  TailedSink sink(store.create(file.name, IfExists::fail));
  ItemWriter writer(sink, file.name, kWindow, file.zstd_level);
  for (const std::size_t index : file.plan.files[static_cast<std::size_t>(file.file)]) {
    OwnItem& item = file.plan.items[index];
    write_item(writer, file.leaves[item.leaf], item, meter);
    sink.end_item(writer.written());
  }
  require_going_on(meter.stop());
  const DataDigest digest = sink.finish();
  sink.commit();
  return digest;
}

std::uint64_t bytes_to_write(const std::vector<Leaf>& leaves, const OwnPlan& plan) {
  std::uint64_t bytes = 0;
  for (const OwnItem& item : plan.items) {
    const Value& value = leaves[item.leaf].value;
    if (item.is_written && value.is(Value::Kind::tensor))
      bytes += byte_size(value.as_tensor().dtype, item.chunk.box.sizes);
  }
  return bytes;
}

void remove_quietly(Store& store, const std::string& name) noexcept {
  try {
    store.remove(name);
  } catch (const std::exception&) {
    return;  // memory may be short, too
  }
}

}  // namespace tessera
