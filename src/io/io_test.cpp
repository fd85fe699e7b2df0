#include <gtest/gtest.h>

#include <map>

#include "conformance/errors.h"
#include "io/testing.h"
#include "tessera/error.h"
#include "tessera/io.h"

namespace tessera {
namespace {

std::vector<std::byte> bytes_of(std::string_view text) {
  const auto view = std::as_bytes(std::span(text.data(), text.size()));
  return {view.begin(), view.end()};
}

std::shared_ptr<ByteSource> source_of(std::string_view text) {
  return memory_source(bytes_of(text), "memory");
}

std::string read(const ByteSource& source, std::uint64_t offset, std::size_t size) {
  std::string text(size, '?');
  source.read_at(offset, std::as_writable_bytes(std::span(text.data(), size)));
  return text;
}

constexpr auto kMax = std::numeric_limits<std::uint64_t>::max();

TEST(MemorySource, ReadsAnyRange) {
  const auto source = source_of("abcdef");
  EXPECT_EQ(source->size(), 6U);
  EXPECT_EQ(source->name(), "memory");
  EXPECT_EQ(read(*source, 0, 6), "abcdef");
  EXPECT_EQ(read(*source, 4, 2), "ef");
  EXPECT_EQ(read(*source, 6, 0), "");
}

TEST(MemorySource, RangesPastTheEndAreIncomplete) {
  const auto source = source_of("abcdef");
  for (const auto& [offset, size] :
       std::map<std::uint64_t, std::size_t>{{5, 2}, {7, 0}, {kMax, 2}}) {
    const Error error = error_of([&] { (void)read(*source, offset, size); });
    EXPECT_EQ(error.code(), ErrorCode::incomplete);
    EXPECT_EQ(error.path(), "memory");
    EXPECT_EQ(error.offset(), offset);
  }
}

TEST(SliceSource, IsASourceOfItsOwn) {
  auto source = source_of("abcdef");
  const auto slice = slice_source(source, 2, 3);
  source.reset();  // the slice shares ownership
  EXPECT_EQ(slice->size(), 3U);
  EXPECT_EQ(read(*slice, 0, 3), "cde");
  EXPECT_EQ(read(*slice_source(slice, 1, 2), 1, 1), "e");
  const Error error = error_of([&] { (void)read(*slice, 2, 2); });
  EXPECT_EQ(error.code(), ErrorCode::incomplete);
  EXPECT_EQ(error.offset(), 4U);  // in the object that the error names
}

TEST(SliceSource, MustLieInsideTheSource) {
  const auto source = source_of("abcdef");
  EXPECT_EQ(slice_source(source, 6, 0)->size(), 0U);
  EXPECT_EQ(error_of([&] { (void)slice_source(source, 4, 3); }).code(), ErrorCode::incomplete);
  EXPECT_EQ(error_of([&] { (void)slice_source(source, kMax, 1); }).code(), ErrorCode::incomplete);
  EXPECT_EQ(error_of([&] { (void)slice_source(source, 1, kMax); }).code(), ErrorCode::incomplete);
}

TEST(ReadAll, ObeysTheCap) {
  const auto source = source_of("abcdef");
  EXPECT_EQ(read_all(*source, 6), bytes_of("abcdef"));
  EXPECT_EQ(error_of([&] { (void)read_all(*source, 5); }).code(), ErrorCode::limit);
  EXPECT_TRUE(read_all(*source_of(""), 0).empty());
}

TEST(CountingSource, CountsCallsAndBytes) {
  const CountingSource source(source_of("abcdef"));
  EXPECT_EQ(read(source, 1, 2), "bc");
  EXPECT_EQ(read(source, 0, 6), "abcdef");
  EXPECT_EQ(source.calls(), 2U);
  EXPECT_EQ(source.bytes(), 8U);
}

TEST(FaultySource, FailsTheNextCallAndAllAfterIt) {
  const FaultySource source(source_of("abcdef"), std::make_shared<Fault>(ErrorCode::io, 2));
  EXPECT_EQ(read(source, 0, 1), "a");
  EXPECT_EQ(read(source, 1, 1), "b");
  EXPECT_EQ(error_of([&] { (void)read(source, 2, 1); }).code(), ErrorCode::io);
  EXPECT_EQ(error_of([&] { (void)read(source, 2, 1); }).code(), ErrorCode::io);
}

// A sink that notes what reaches it.
class NotingSink final : public ByteSink {
 public:
  explicit NotingSink(std::string& notes) : notes_(notes) {}
  void write_at(std::uint64_t offset, ByteView bytes) override {
    notes_ += std::to_string(offset) + "+" + std::to_string(bytes.size()) + " ";
  }
  void commit() override { notes_ += "commit"; }
  [[nodiscard]] const std::string& name() const override { return name_; }

 private:
  std::string& notes_;
  std::string name_ = "noting";
};

TEST(FaultySink, FailsWhenTheRoomIsUsedUp) {
  std::string notes;
  FaultySink sink(std::make_unique<NotingSink>(notes),
                  std::make_shared<Fault>(ErrorCode::out_of_space, Fault::kNever, 8));
  sink.write_at(0, bytes_of("12345678"));
  EXPECT_EQ(error_of([&] { sink.write_at(8, bytes_of("9")); }).code(), ErrorCode::out_of_space);
  EXPECT_EQ(error_of([&] { sink.commit(); }).code(), ErrorCode::out_of_space);
  EXPECT_EQ(notes, "0+8 ");
}

TEST(FaultySink, CanFailTheCommitAlone) {
  std::string notes;
  FaultySink sink(std::make_unique<NotingSink>(notes), std::make_shared<Fault>(ErrorCode::io, 1));
  sink.write_at(0, bytes_of("1"));
  EXPECT_EQ(error_of([&] { sink.commit(); }).code(), ErrorCode::io);
  EXPECT_EQ(notes, "0+1 ");
}

}  // namespace
}  // namespace tessera
