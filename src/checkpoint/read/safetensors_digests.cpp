#include "checkpoint/read/safetensors_digests.h"

#include <algorithm>
#include <span>
#include <utility>

#include "base/digest.h"
#include "base/numbers.h"
#include "checkpoint/read/side_file.h"
#include "io/checked_source.h"
#include "tessera/error.h"

namespace tessera {

class DigestingStore::Sink final : public ByteSink {
 public:
  Sink(DigestingStore& store, std::string object, std::unique_ptr<ByteSink> sink)
      : store_(store), object_(std::move(object)), sink_(std::move(sink)) {}

  void write_at(std::uint64_t offset, ByteView bytes) override { sink_.write_at(offset, bytes); }
  void commit() override {
    sink_.commit();
    store_.add(object_, {sink_.size(), sink_.digests(), 0});
  }
  [[nodiscard]] const std::string& name() const override { return sink_.name(); }

 private:
  DigestingStore& store_;
  std::string object_;
  DigestSink sink_;
};

std::unique_ptr<ByteSink> DigestingStore::create(std::string_view name, IfExists if_exists,
                                                 std::uint64_t size_hint) {
  return std::make_unique<Sink>(*this, std::string(name),
                                inner().create(name, if_exists, size_hint));
}

std::unique_ptr<ByteSink> DigestingStore::replace(std::string_view name, std::string_view expected,
                                                  std::uint64_t size_hint) {
  return std::make_unique<Sink>(*this, std::string(name),
                                inner().replace(name, expected, size_hint));
}

void DigestingStore::remove(std::string_view name) {
  inner().remove(name);
  const std::lock_guard lock(mutex_);
  digests_.erase(std::string(name));
}

FileDigests DigestingStore::digests_of(const std::string& name) {
  const std::lock_guard lock(mutex_);
  return digests_.at(name);
}

void DigestingStore::add(const std::string& name, FileDigests digests) {
  const std::lock_guard lock(mutex_);
  digests_[name] = std::move(digests);
}

void DigestingStore::write_side_file(const std::string& editable) {
  const std::lock_guard lock(mutex_);
  digests_.erase(editable);
  const std::string text = encode_side_file({"", own_producer(), digests_});
  put(inner(), kDirectorySideFile, std::as_bytes(std::span(text.data(), text.size())),
      IfExists::fail);
}

namespace {

constexpr const char* kKey = "tessera.digests";  // our entry of __metadata__
// A second entry, which says that the first one must be there: damage to its name would hide it.
constexpr const char* kMark = "tessera.sealed";
// The text before the entry's value in a header; names with a quote in them are escaped.
constexpr std::string_view kBefore = "\"tessera.digests\":\"";

std::string_view text_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// `head`: all bytes before the data section, `digests`: our entry in them.
void require_own_checksum(std::string_view head, std::string_view digests,
                          const ByteSource& source) {
  const std::size_t at = head.find(kBefore);
  if (at != std::string_view::npos && digests.size() >= kDigestDigits &&
      has_checksum(head, at + kBefore.size())) {
    return;
  }
  throw Error(ErrorCode::corrupt,
              "the header differs from its own checksum: it was changed, or another program copied "
              "our entry tessera.digests into it")
      .at_path(source.name());
}

}  // namespace

bool is_digest_key(std::string_view key) noexcept {
  return key == kKey || key == kMark;
}

void reserve_digests(safetensors::Header& header) {
  std::uint64_t size = 0;
  for (const safetensors::Entry& entry : header.entries) {
    size = checked_add(size, byte_size(entry.dtype, entry.shape));
  }
  const std::uint64_t digits = (1 + digest_blocks(size)) * kDigestDigits;
  header.metadata[kKey] = std::string(narrow<std::size_t>(digits), '0');
  header.metadata[kMark] = "1";
}

void fill_digests(std::vector<std::byte>& head, const Digests& digests) {
  std::string text(text_of(head));
  const std::size_t at = text.find(kBefore) + kBefore.size();
  const std::string value = digests_text(digests);
  text.replace(at + kDigestDigits, value.size(), value);
  stamp_checksum(text, at);
  std::transform(text.begin(), text.end(), head.begin(), [](char c) { return std::byte(c); });
}

std::shared_ptr<const ByteSource> guard_safetensors(std::shared_ptr<const ByteSource> source,
                                                    const safetensors::Header& header) {
  const auto entry = header.metadata.find(kKey);
  if (entry == header.metadata.end()) {
    if (!header.metadata.contains(kMark)) return source;
    throw Error(ErrorCode::corrupt, "the metadata says that there are digests, and has none")
        .at_path(source->name());
  }
  const std::string& value = entry->second;
  const auto head = read_all(*slice_source(source, 0, header.data_offset), header.data_offset);
  require_own_checksum(text_of(head), value, *source);
  // One whose directory's side file has its digests is not checked twice.
  if (source->checked()) return source;
  Digests digests = digests_of_text(std::string_view(value).substr(kDigestDigits));
  return std::make_shared<CheckedSource>(std::move(source), std::move(digests), header.data_offset);
}

}  // namespace tessera
