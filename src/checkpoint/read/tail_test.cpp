#include "checkpoint/read/tail.h"

#include <filesystem>
#include <fstream>
#include <random>

#include "base/digest.h"
#include "base/numbers.h"
#include "checkpoint/read/side_file.h"
#include "checkpoint/save/messages.h"
#include "checkpoint/test_support.h"

namespace tessera {

// The tails of data files: what they say is checked with every read, and never believed unchecked.

namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
namespace fs = std::filesystem;

std::vector<std::byte> random_bytes(std::size_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

struct Written {
  std::vector<std::byte> bytes;
  DataDigest digest;
};

Written written(const std::vector<std::vector<std::byte>>& items) {
  const auto store = memory_store();
  TailedSink sink(store->create("f", IfExists::fail));
  std::uint64_t at = 0;
  for (const auto& item : items) {
    const std::size_t half = item.size() / 2;  // the end first, as headers come after data
    sink.write_at(at + half, ByteView(item).subspan(half));
    sink.write_at(at, ByteView(item).first(half));
    at += item.size();
    sink.end_item(at);
  }
  const DataDigest digest = sink.finish();
  sink.commit();
  return {read_all(*store->open("f"), 1 << 26), digest};
}

std::vector<std::byte> read_checked(std::vector<std::byte> bytes, const DataDigest& digest) {
  return read_all(*tailed_source(memory_source(std::move(bytes), "f"), digest), 1 << 26);
}

TEST(Tail, EveryFlippedByteIsCorruptWhereItIs) {
  const Written file = written({random_bytes(300, 1), {}, random_bytes(77, 2)});
  EXPECT_EQ(file.bytes.size(), 377 + tail_size(377, 3));
  EXPECT_EQ(file.digest.size, file.bytes.size());
  EXPECT_EQ(read_checked(file.bytes, file.digest), file.bytes);
  for (std::size_t at = 0; at < file.bytes.size(); ++at) {
    auto damaged = file.bytes;
    damaged[at] ^= std::byte{16};
    try {
      (void)read_checked(damaged, file.digest);
      FAIL() << at;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::corrupt) << at;
      EXPECT_EQ(error.path(), "f");
      const bool is_in_items = at < 377;
      EXPECT_EQ(error.offset().value() == 0, is_in_items) << at;
    }
  }
}

TEST(Tail, BlocksAreFoundByTheirPlace) {
  const Written file = written({random_bytes(2 * kDigestBlock + 5, 3), random_bytes(9, 4)});
  auto damaged = file.bytes;
  damaged[kDigestBlock + 7] ^= std::byte{1};
  const auto source = tailed_source(memory_source(damaged, "f"), file.digest);
  std::vector<std::byte> part(10);
  source->read_at(100, part);  // of another block
  EXPECT_TRUE(std::equal(part.begin(), part.end(), file.bytes.begin() + 100));
  try {
    source->read_at(kDigestBlock - 5, part);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::corrupt);
    EXPECT_EQ(error.offset().value(), kDigestBlock);
  }
}

TEST(Tail, AnItemHasOneDigestWhereverItLies) {
  const auto a = random_bytes(kDigestBlock + 3, 5), b = random_bytes(40, 6);
  const Written ab = written({a, b}), ba = written({b, a});
  const auto items_of = [](const Written& file) {
    return read_item_digests(*memory_source(file.bytes, "f"), file.digest);
  };
  const Digests one = items_of(ab), other = items_of(ba);
  ASSERT_EQ(one.size(), 2U);
  EXPECT_EQ(one[0], other.at(1));
  EXPECT_EQ(one[1], other.at(0));
  EXPECT_NE(one[0], one[1]);
}

// Also if the recorded digest is that of the lie.
TEST(Tail, D09NumbersThatDoNotFitTheFileAreCorrupt) {
  const Written file = written({random_bytes(100, 7)});
  const std::uint64_t footer = file.bytes.size() - 40;
  for (const std::uint64_t at : {0, 8, 16, 24, 32}) {
    for (const std::uint64_t number : {std::uint64_t{0}, std::uint64_t{101}, std::uint64_t{1} << 40,
                                       std::uint64_t{1} << 61, ~std::uint64_t{0}}) {
      auto forged = file.bytes;
      store_le(forged.data() + footer + at, number);
      const DataDigest digest{forged.size(), digest64(ByteView(forged).subspan(100))};
      EXPECT_EQ(code_of([&] { (void)read_checked(forged, digest); }), ErrorCode::corrupt)
          << at << " " << number;
    }
  }
  for (const std::size_t size : {std::size_t{1}, std::size_t{39}, file.bytes.size() - 8}) {
    auto cut = file.bytes;
    cut.resize(size);
    std::byte one[1] = {};
    const auto source = tailed_source(memory_source(cut, "f"), {size, file.digest.tail});
    EXPECT_EQ(code_of([&] { source->read_at(0, one); }), ErrorCode::corrupt) << size;
  }
}

TEST(Tail, ASideFileOfTailsThereAndBack) {
  const SideFile side_file{
      "id", "someone", {{"m", {3, {7}, 0, {}}}, {"d", {1 << 30, {}, 0, ~std::uint64_t{0}}}}};
  const std::string text = encode_side_file(side_file);
  EXPECT_NE(text.find("\"version\": 2"), std::string::npos);
  const SideFile back = decode_side_file(text);
  EXPECT_EQ(back.files.at("m").blocks, Digests{7});
  EXPECT_FALSE(back.files.at("m").tail);
  EXPECT_EQ(back.files.at("d").size, 1U << 30);
  EXPECT_EQ(back.files.at("d").tail, ~std::uint64_t{0});
  for (std::size_t at = 0; at < text.size(); ++at) {
    std::string changed = text;
    changed[at] = static_cast<char>(changed[at] ^ 1);
    EXPECT_EQ(code_of([&] { (void)decode_side_file(changed); }), ErrorCode::corrupt) << at;
  }
}

// What a rank says of a file does not grow with the file.
TEST(Tail, AReportHasAtMost32BytesAFile) {
  RankReport report{3, "", {}};
  const std::size_t none = encode_report(report, 0).size();
  report.files.push_back({127, {~std::uint64_t{0}, ~std::uint64_t{0}}});
  EXPECT_LE(encode_report(report, 0).size() - none, 32U);
  const Reports back = decode_reports(encode_report(report, 5));
  EXPECT_EQ(back.ranks.at(0).files.at(0).digest.size, ~std::uint64_t{0});
  EXPECT_EQ(back.ranks.at(0).files.at(0).digest.tail, ~std::uint64_t{0});
}

class TailedCheckpoint : public ::testing::Test {
 protected:
  // Two ranks with 1.2 MB each; values are in rank 0's file.
  void SetUp() override {
    run_ranks(2, [&](Group& group) {
      const Shape shape = {600, 1000};
      Value tree = Value::dict();
      tree.set_item("w", Value(counting(shape, chunk(shape, group.rank(), 2), 0)));
      tree.set_item("step", Value(3));
      save(tree, directory_, {.threads = 1}, group);
    });
  }
  [[nodiscard]] std::string file_with(const std::string& part) const {
    for (const auto& entry : fs::directory_iterator(directory_)) {
      if (entry.path().filename().string().find(part) != std::string::npos)
        return entry.path().string();
    }
    return "";
  }
  static void flip(const std::string& path, std::uint64_t at) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(at));
    const char byte = static_cast<char>(file.get() ^ 4);
    file.seekp(static_cast<std::streamoff>(at));
    file.put(byte);
  }

  std::string directory_ = temporary_directory() + "/c";
};

TEST_F(TailedCheckpoint, OpeningReadsNoTailAndReadingDoes) {
  const std::string file = file_with("__1_0");
  flip(file, fs::file_size(file) - 1);
  const Checkpoint checkpoint = Checkpoint::open(directory_);
  EXPECT_EQ(code_of([&] { (void)checkpoint.load(); }), ErrorCode::corrupt);
  const VerifyReport report = verify(directory_);
  ASSERT_FALSE(report.findings.empty());
  EXPECT_EQ(report.findings[0].code, ErrorCode::corrupt);
}

TEST_F(TailedCheckpoint, EveryByteOfTailsAndSideFileIsChecked) {
  for (const std::string part : {"__0_0", "__1_0", "tessera-"}) {
    const std::string file = file_with(part);
    const std::uint64_t size = fs::file_size(file);
    for (std::uint64_t at = size - std::min<std::uint64_t>(size, 80); at < size; ++at) {
      flip(file, at);
      EXPECT_FALSE(verify(directory_).findings.empty()) << file << " " << at;
      flip(file, at);
    }
  }
  EXPECT_TRUE(verify(directory_).findings.empty());
  std::mt19937 random(17);
  for (int round = 0; round < 100; ++round) {
    const std::string file = file_with(round % 2 == 0 ? "__0_0" : "__1_0");
    const std::uint64_t at = random() % fs::file_size(file);
    flip(file, at);
    EXPECT_FALSE(verify(directory_).findings.empty()) << file << " " << at;
    flip(file, at);
  }
}

// A file is verified in parts, each of which reads the tail first.
TEST(Tail, VerifySaysOnceThatOneIsDamaged) {
  const std::string directory = temporary_directory() + "/c";
  const std::vector<float> elements(35 << 20, 1.5F);  // three parts
  Tensor tensor;
  tensor.shape = {static_cast<std::int64_t>(elements.size())};
  auto storage = std::make_shared<Storage>();
  storage->data = reinterpret_cast<std::byte*>(const_cast<float*>(elements.data()));
  storage->size = elements.size() * sizeof(float);
  tensor.pieces.push_back({whole(tensor.shape), std::move(storage), 0, {}, -1});
  save(Value::dict({{"w", std::move(tensor)}}), directory, {.threads = 1});
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (entry.path().extension() != ".distcp") continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end);
    file.put('?');
  }
  const VerifyReport report = verify(directory);
  ASSERT_EQ(report.findings.size(), 1U);
  EXPECT_EQ(report.findings[0].code, ErrorCode::corrupt);
}

TEST_F(TailedCheckpoint, NobodyWarnsOfTails) {
  EXPECT_TRUE(Checkpoint::open(directory_).warnings.empty());
  EXPECT_TRUE(seal(directory_, {}).was_sealed);
  fs::remove(file_with("tessera-"));
  EXPECT_TRUE(Checkpoint::open(directory_).warnings.empty());
  EXPECT_FALSE(seal(directory_, {}).was_sealed);  // digests of blocks, with the tails
  const VerifyReport report = verify(directory_);
  EXPECT_TRUE(report.findings.empty());
  EXPECT_EQ(report.bytes_unchecked, 0U);
  std::ofstream(file_with("__1_0"), std::ios::binary | std::ios::app) << "more";
  fs::remove(file_with("tessera-"));
  EXPECT_EQ(Checkpoint::open(directory_).warnings.size(), 1U);
}

TEST_F(TailedCheckpoint, AConversionHasTails) {
  const std::string target = temporary_directory() + "/d";
  ConvertOptions options;
  options.to = CheckpointKind::dcp;
  convert(directory_, target, options);
  const Checkpoint checkpoint = Checkpoint::open(target);
  EXPECT_TRUE(checkpoint.warnings.empty());
  EXPECT_TRUE(verify(checkpoint).findings.empty());
  const SideFile side_file = decode_side_file([&] {
    for (const auto& entry : fs::directory_iterator(target)) {
      if (!is_side_file_name(entry.path().filename().string())) continue;
      std::ifstream file(entry.path(), std::ios::binary);
      return std::string((std::istreambuf_iterator<char>(file)), {});
    }
    return std::string();
  }());
  for (const auto& [name, file] : side_file.files) EXPECT_EQ(!file.tail, name == ".metadata");
}

}  // namespace
}  // namespace tessera
