#include "checkpoint/dcp/catalog.h"

#include <algorithm>
#include <array>

#include "base/digest.h"
#include "format/pickle/pickle.h"
#include "tessera/error.h"

namespace tessera {
namespace {

enum class Step : std::uint8_t { text, index, key };  // as PathPart has them

}  // namespace

void write_shape(MessageWriter& message, const Shape& shape) {
  message.count(shape.size());
  for (const std::int64_t size : shape) message.count(static_cast<std::uint64_t>(size));
}

Shape read_shape(MessageReader& message) {
  Shape shape;
  for (auto count = message.count(); count > 0; --count)
    shape.push_back(static_cast<std::int64_t>(message.count()));
  return shape;
}

void write_path(MessageWriter& message, const Path& path) {
  message.count(path.size());
  for (const PathPart& part : path) {
    if (const auto* index = std::get_if<std::int64_t>(&part)) {
      message.number(Step::index).number(*index);
    } else if (const auto* key = std::get_if<DictKey>(&part)) {
      message.number(Step::key).text(key->text).block(pickle::write(key->key));
    } else {
      message.number(Step::text).text(std::get<std::string>(part));
    }
  }
}

Path read_path(MessageReader& message) {
  Path path;
  for (auto count = message.count(); count > 0; --count) {
    const auto step = message.number<Step>();
    if (step == Step::index) {
      path.emplace_back(message.number<std::int64_t>());
      continue;
    }
    std::string text = message.text();
    if (step == Step::key) {
      Value key = pickle::read(message.block()).value;
      path.emplace_back(DictKey{std::move(text), std::move(key)});
    } else {
      path.emplace_back(std::move(text));
    }
  }
  return path;
}

// 8 bytes say where the head begins; then come the entries, then the head, then a column that says
// where each file's record begins, then these records. An entry of a tensor has the number of its
// chunks and a column for each offset, size, file, position, length and encoding. A column is its
// width, its least number and, unless all its numbers are that, a row for each.

namespace {

enum class EntryKind : std::uint8_t { tensor, value, item };

constexpr std::size_t kPlaceColumns = 4;      // behind those of the boxes
constexpr std::uint64_t kDigestedEnd = 4096;  // bytes
constexpr std::size_t kHeadPosition = sizeof(std::uint64_t);

std::uint8_t width_of(std::uint64_t most) {
  if (most == 0) return 0;
  if (most <= 0xff) return 1;
  if (most <= 0xffff) return 2;
  return most <= 0xffffffff ? 4 : 8;
}

void write_column(MessageWriter& message, const std::vector<std::uint64_t>& numbers) {
  const auto [least, most] = std::ranges::minmax(numbers);
  const std::uint8_t width = width_of(most - least);
  message.number(width).count(least);
  for (const std::uint64_t number : numbers) {
    std::array<std::byte, sizeof number> bytes{};
    store_le(bytes.data(), number - least);
    message.rest(std::span(bytes).first(width));
  }
}

void write_files(MessageWriter& message, const std::vector<ObjectInfo>& files) {
  message.count(files.size());
  for (const ObjectInfo& file : files) message.text(file.name).number(file.size);
}

std::vector<ObjectInfo> read_files(MessageReader& message) {
  std::vector<ObjectInfo> files(message.count());
  for (ObjectInfo& file : files) {
    file.name = message.text();
    file.size = message.number<std::uint64_t>();
  }
  return files;
}

void write_digests(MessageWriter& message, const FileDigests& digests) {
  message.count(digests.size).count(digests.origin).count(digests.tail ? 1 : 0);
  if (digests.tail) message.number(*digests.tail);
  message.count(digests.blocks.size());
  message.rest(std::as_bytes(std::span(digests.blocks)));
}

FileDigests read_digests(MessageReader& message) {
  FileDigests digests;
  digests.size = message.count();
  digests.origin = message.count();
  if (message.count() == 1) digests.tail = message.number<std::uint64_t>();
  digests.blocks.resize(message.count());
  for (std::uint64_t& block : digests.blocks) block = message.number<std::uint64_t>();
  return digests;
}

// The column and the records.
void write_data_files(MessageWriter& message, const std::vector<CatalogFile>& files) {
  MessageWriter records;
  std::vector<std::uint64_t> begins;
  for (const CatalogFile& file : files) {
    begins.push_back(records.size());
    write_file(records, file);
  }
  message.count(files.size());
  if (!files.empty()) write_column(message, begins);
  message.rest(records.take());
}

void write_head(MessageWriter& message, const CatalogHead& head) {
  message.text(head.version).text(head.save_id).text(head.types);
  message.value(head.warnings).value(head.missing).value(head.idle);
  message.number(static_cast<std::int32_t>(head.world_size)).number(head.metadata_end);
  write_files(message, head.metadata);
  message.count(head.digests.size());
  for (const auto& [name, digests] : head.digests) {
    message.text(name);
    write_digests(message, digests);
  }
}

CatalogHead read_head(MessageReader& message) {
  CatalogHead head;
  head.version = message.text();
  head.save_id = message.text();
  head.types = message.text();
  for (auto* lines : {&head.warnings, &head.missing, &head.idle})
    *lines = message.value<std::vector<std::string>>();
  head.world_size = message.number<std::int32_t>();
  head.metadata_end = message.number<std::uint64_t>();
  head.metadata = read_files(message);
  for (auto count = message.count(); count > 0; --count) {
    const std::string name = message.text();
    head.digests.emplace(name, read_digests(message));
  }
  return head;
}

void write_place(MessageWriter& message, const ItemRange& place) {
  message.count(place.file).count(place.offset).count(place.size);
  message.count(static_cast<std::uint64_t>(place.encoding));
}

ItemRange read_place(MessageReader& message) {
  ItemRange place;
  place.file = static_cast<std::uint32_t>(message.count());
  place.offset = message.count();
  place.size = message.count();
  place.encoding = static_cast<Encoding>(message.count());
  return place;
}

dcp::EntryHead read_entry_head(MessageReader& message) {
  dcp::EntryHead head;
  head.name = message.text();
  if (message.count() == 1) head.path = read_path(message);
  return head;
}

}  // namespace

void write_file(MessageWriter& message, const CatalogFile& file) {
  message.text(file.info.name).count(file.info.size).text(file.info.version);
  message.count(file.is_missing ? 2 : file.digests ? 1 : 0);
  if (file.digests && !file.is_missing) write_digests(message, *file.digests);
}

CatalogFile read_file(MessageReader& message) {
  CatalogFile file;
  file.info.name = message.text();
  file.info.size = message.count();
  file.info.version = message.text();
  const std::uint64_t more = message.count();
  if (more == 1) file.digests = read_digests(message);
  file.is_missing = more == 2;
  return file;
}

std::uint64_t digest_of_end(const ByteSource& file) {
  const std::uint64_t size = std::min(file.size(), kDigestedEnd);
  std::vector<std::byte> end(static_cast<std::size_t>(size));
  file.read_at(file.size() - size, end);
  return digest64(end);
}

bool is_metadata_of(const CatalogHead& head, const ByteSource& found) {
  return found.size() == head.metadata.front().size && digest_of_end(found) == head.metadata_end;
}

CatalogWriter::CatalogWriter() {
  bytes_.number(std::uint64_t{0});  // where the head begins, when that is known
}

void CatalogWriter::add_head(const dcp::EntryHead& head) {
  end_tensor();
  bytes_.text(head.name).count(head.path ? 1 : 0);
  if (head.path) write_path(bytes_, *head.path);
}

void CatalogWriter::add_tensor(const dcp::EntryHead& head) {
  add_head(head);
  bytes_.number(EntryKind::tensor).number(head.dtype).count(head.requires_grad ? 1 : 0);
  write_shape(bytes_, head.shape);
  columns_.resize(2 * head.shape.size() + kPlaceColumns);
  for (auto& column : columns_) column.clear();
  in_tensor_ = true;
}

void CatalogWriter::add_chunk(Numbers offsets, Numbers sizes, const ItemRange& place) {
  std::size_t column = 0;
  const auto add = [&](auto number) {
    columns_[column++].push_back(static_cast<std::uint64_t>(number));
  };
  for (const std::int64_t offset : offsets) add(offset);
  for (const std::int64_t size : sizes) add(size);
  add(place.file);
  add(place.offset);
  add(place.size);
  add(static_cast<std::uint64_t>(place.encoding));
}

void CatalogWriter::end_tensor() {
  if (!in_tensor_) return;
  in_tensor_ = false;
  const std::size_t chunks = columns_.back().size();
  bytes_.count(chunks);
  if (chunks == 0) return;
  for (const auto& column : columns_) write_column(bytes_, column);
}

void CatalogWriter::add_value(const dcp::EntryHead& head, ByteView pickle) {
  add_head(head);
  bytes_.number(EntryKind::value).block(pickle);
}

void CatalogWriter::add_item(const dcp::EntryHead& head, const ItemRange& place) {
  add_head(head);
  bytes_.number(EntryKind::item);
  write_place(bytes_, place);
}

Bytes CatalogWriter::finish(const CatalogHead& head, const std::vector<CatalogFile>& files) {
  end_tensor();
  const auto position = static_cast<std::uint64_t>(bytes_.size());
  write_head(bytes_, head);
  write_data_files(bytes_, files);
  Bytes bytes = bytes_.take();
  store_le(bytes.data(), position);
  return bytes;
}

CatalogColumn::CatalogColumn(MessageReader& message, std::size_t rows) {
  width_ = message.number<std::uint8_t>();
  base_ = message.count();
  rows_ = message.bytes(rows * width_);
}

std::uint64_t CatalogColumn::operator[](std::size_t row) const {
  const std::byte* const at = rows_.data() + row * width_;
  switch (width_) {
    case 0:
      return base_;
    case 1:
      return base_ + load_le<std::uint8_t>(at);
    case 2:
      return base_ + load_le<std::uint16_t>(at);
    case 4:
      return base_ + load_le<std::uint32_t>(at);
    default:
      return base_ + load_le<std::uint64_t>(at);
  }
}

CatalogChunks::CatalogChunks(MessageReader& message) {
  const Shape shape = read_shape(message);
  dimensions_ = shape.size();
  size_ = static_cast<std::size_t>(message.count());
  if (size_ == 0) return;
  for (std::size_t i = 0; i < 2 * dimensions_ + kPlaceColumns; ++i)
    columns_.emplace_back(message, size_);
}

Box CatalogChunks::box(std::size_t number) const {
  Box box;
  for (std::size_t d = 0; d < dimensions_; ++d) {
    box.offsets.push_back(this->number(d, number));
    box.sizes.push_back(this->number(dimensions_ + d, number));
  }
  return box;
}

bool CatalogChunks::meets(std::size_t number, const Box& box) const {
  for (std::size_t d = 0; d < dimensions_; ++d) {
    const std::int64_t begin = this->number(d, number);
    if (begin >= box.offsets[d] + box.sizes[d]) return false;
    if (begin + this->number(dimensions_ + d, number) <= box.offsets[d]) return false;
  }
  return true;
}

ItemRange CatalogChunks::place(std::size_t number) const {
  const std::size_t first = 2 * dimensions_;
  return {static_cast<std::uint32_t>(columns_[first][number]), columns_[first + 1][number],
          columns_[first + 2][number], static_cast<Encoding>(columns_[first + 3][number])};
}

Catalog::Catalog(ByteView bytes) {
  MessageReader message(bytes);
  const auto head = message.number<std::uint64_t>();
  (void)message.bytes(head - kHeadPosition);
  head_ = read_head(message);
  files_ = static_cast<std::size_t>(message.count());
  if (files_ > 0) records_ = CatalogColumn(message, files_);
  file_records_ = message.rest();
  entries_ = bytes.subspan(kHeadPosition, static_cast<std::size_t>(head) - kHeadPosition);
}

CatalogFile Catalog::file(std::size_t number) const {
  MessageReader message(file_records_.subspan(static_cast<std::size_t>(records_[number])));
  return read_file(message);
}

void Catalog::for_each(const std::function<void(const Entry& entry)>& visit) const {
  for (MessageReader message(entries_); !message.at_end();) {
    Entry entry{read_entry_head(message), 0, std::nullopt, std::nullopt};
    switch (message.number<EntryKind>()) {
      case EntryKind::tensor: {
        entry.head.is_tensor = true;
        entry.head.dtype = message.number<DType>();
        entry.head.requires_grad = message.count() == 1;
        entry.chunks = entries_.size() - message.rest().size();
        MessageReader ahead(message.rest());
        entry.head.shape = read_shape(ahead);
        (void)CatalogChunks(message);
        break;
      }
      case EntryKind::value:
        entry.value = message.block();
        break;
      case EntryKind::item:
        entry.item = read_place(message);
        break;
    }
    visit(entry);
  }
}

CatalogChunks Catalog::chunks_at(std::size_t position) const {
  MessageReader message(entries_.subspan(position));
  return CatalogChunks(message);
}

}  // namespace tessera
