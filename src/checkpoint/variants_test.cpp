// Variants of DCP and of sharded safetensors, read as PyTorch reads them
// (tests/golden/make/variants_expect.py), and what is wrong with damaged ones: F-03, F-03b, F-07,
// P-04, P-11, P-23, P-24, reliability M and D.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include <nlohmann/json.hpp>

#include "base/crc32.h"
#include "checkpoint/test_support.h"
#include "format/dcp/dcp.h"
#include "format/dcp/testing.h"
#include "format/pickle/pickle.h"
#include "value/render.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using namespace testing_support;  // NOLINT(google-build-using-namespace)

nlohmann::json expected_variants() {
  std::ifstream file(kGolden + "variants/expected.json");
  return nlohmann::json::parse(file);
}

void expect_same(const Checkpoint& checkpoint, const nlohmann::json& names) {
  EXPECT_EQ(checkpoint.leaves.size(), names.size());
  std::map<std::string, const Leaf*> found;
  for (const Leaf& leaf : checkpoint.leaves) found.emplace(leaf.name, &leaf);
  for (const auto& [name, row] : names.items()) {
    ASSERT_TRUE(found.contains(name)) << name;
    if (!row.contains("dtype")) {
      EXPECT_EQ(render(found[name]->value, 10000), row.at("value").get<std::string>()) << name;
      continue;
    }
    Checkpoint one = checkpoint;
    one.leaves = {*found[name]};
    one.leaves[0].path = {name};
    const Value loaded = one.load();
    const Tensor& tensor = loaded.at(name).as_tensor();
    EXPECT_EQ(to_string(tensor.dtype), row.at("dtype").get<std::string>()) << name;
    EXPECT_EQ(tensor.shape, row.at("shape").get<Shape>()) << name;
    const Storage& storage = *tensor.pieces.at(0).storage;
    EXPECT_EQ(crc32({storage.data, storage.size}), row.at("crc32").get<std::uint32_t>()) << name;
  }
}

class Variant : public testing::TestWithParam<std::string> {};

TEST_P(Variant, ReadsAsPyTorchReadsIt) {
  const Checkpoint checkpoint = Checkpoint::open(kGolden + GetParam());
  expect_same(checkpoint, expected_variants().at(GetParam()));
  EXPECT_TRUE(checkpoint.warnings.empty()) << checkpoint.warnings.at(0);
  const VerifyReport report = verify(kGolden + GetParam());
  EXPECT_TRUE(report.findings.empty()) << report.findings.at(0).text;
}

// Every variant into every kind, and the same tree in it.
TEST_P(Variant, Converts) {
  const std::string root = temporary_directory();
  const auto original = Checkpoint::open(kGolden + GetParam());
  for (const auto& [name, kind] : {std::pair("/dcp", CheckpointKind::dcp),
                                   std::pair("/a.safetensors", CheckpointKind::safetensors),
                                   std::pair("/a.pt", CheckpointKind::torch_file)}) {
    ConvertOptions options;
    options.to = kind;
    (void)convert(kGolden + GetParam(), root + name, options);
    if (kind == CheckpointKind::torch_file) continue;
    const auto differences = diff(original, Checkpoint::open(root + name));
    EXPECT_TRUE(differences.empty()) << name << " " << differences.at(0).name;
  }
}

std::vector<std::string> variant_names() {
  std::vector<std::string> names;
  const nlohmann::json all = expected_variants();
  for (const auto& [name, rows] : all.items()) names.push_back(name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(PyTorch, Variant, testing::ValuesIn(variant_names()));

ErrorCode read_code(const std::string& path) {
  return code_of([&] { (void)Checkpoint::open(path).load(); });
}

// Writes `.metadata` anew after `change`.
template <typename F>
void rewrite_metadata(const std::string& directory, F&& change) {
  const std::string text = text_of(directory + "/.metadata");
  dcp::Metadata metadata =
      dcp::decode({reinterpret_cast<const std::byte*>(text.data()), text.size()});
  change(metadata);
  const std::vector<std::byte> bytes = dcp::encode(metadata);
  write_text(directory + "/.metadata", {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

// Changes the item of a tensor's first chunk.
template <typename F>
void change_item(dcp::Metadata& metadata, const std::string& name, F&& change) {
  dcp::change_chunk(entry_of(metadata, name), 0, [&](dcp::Chunk& chunk) { change(chunk.item); });
}

// olmo_core's own _StorageInfo.
TEST(DcpVariant, OlmoCore) {
  const Value tree = Checkpoint::open(kGolden + "variants/olmo_core").load();
  EXPECT_EQ(floats(tree.at("w").as_tensor()), (std::vector<float>{0, 1, 2, 3}));
  EXPECT_EQ(tree.at("n").as_int(), 3);
}

// Torch 1.13 has the classes of `.metadata` in another package: every value is there.
TEST(DcpVariant, Torch113) {
  const std::string directory = copy_of(kGolden + "variants/old");
  const std::string stored = text_of(directory + "/.metadata");
  const std::vector<std::byte> bytes = pickle::write(
      pickle::read({reinterpret_cast<const std::byte*>(stored.data()), stored.size()}).value,
      {.protocol = 2, .persistent_id = {}, .reduce = {}});
  std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const std::string newer = "ctorch.distributed.checkpoint.";
  const std::string older = "ctorch.distributed._shard.checkpoint.";
  for (auto at = text.find(newer); at != std::string::npos; at = text.find(newer))
    text.replace(at, newer.size(), older);
  write_text(directory + "/.metadata", text);
  expect_same(Checkpoint::open(directory), expected_variants().at("variants/old"));
  EXPECT_TRUE(scan(directory).clean());
}

// P-11: a tree whose containers were one item each before torch 2.4.
TEST(DcpVariant, LoadsContainersThatWereOneItem) {
  Value state = Value::dict({{"exp_avg", counting({3, 2}, whole({3, 2}), 0, false)}});
  Value tree = Value::dict(
      {{"model", Value::dict({{"w", counting({3, 2}, whole({3, 2}), 0, false)}})},
       {"optim", Value::dict({{"state", Value::dict({{"w", std::move(state)}})},
                              {"param_groups", Value::list({Value::dict({{"lr", 1.0}})})},
                              {"cfg", Value::dict({{"a", Value::dict({{"b", 0}})}})}})}});
  const auto group = solo_group();
  load(tree, kGolden + "variants/old", *group);
  EXPECT_EQ(floats(tree.at("model").at("w").as_tensor()), (std::vector<float>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(floats(tree.at("optim").at("state").at("w").at("exp_avg").as_tensor()),
            std::vector<float>(6, 0.5F));
  EXPECT_EQ(tree.at("optim").at("param_groups").items()[0].at("lr").as_real(), 0.1);
  EXPECT_EQ(tree.at("optim").at("cfg").at("a").at("b").as_int(), 1);
}

// P-04: one rank's file is missing in the middle, or at the end.
TEST(DcpVariant, ARankWithoutMetadata) {
  const std::string directory = copy_of(kGolden + "variants/c2_nocoll");
  fs::remove(directory + "/__0.metadata");
  EXPECT_EQ(open_code(directory), ErrorCode::incomplete);
  const std::string last = copy_of(kGolden + "variants/c2_nocoll");
  fs::remove(last + "/__1.metadata");
  EXPECT_EQ(open_code(last), ErrorCode::incomplete);
}

TEST(DcpVariant, RanksThatContradictEachOther) {
  const std::string directory = copy_of(kGolden + "variants/c2_nocoll");
  fs::copy_file(kGolden + "variants/m2d/.metadata", directory + "/__2.metadata");
  EXPECT_EQ(open_code(directory), ErrorCode::corrupt);  // `tiny` has another shape
}

// M16.
TEST(DcpVariant, MetadataThatIsTemporaryOrDouble) {
  const std::string unfinished = copy_of(kGolden + "variants/m2d");
  fs::rename(unfinished + "/.metadata", unfinished + "/.metadata.tmp");
  EXPECT_EQ(open_code(unfinished), ErrorCode::incomplete);

  const std::string both = copy_of(kGolden + "variants/m2d");
  fs::copy_file(both + "/.metadata", both + "/.metadata.tmp");
  EXPECT_EQ(Checkpoint::open(both).leaves.size(), 5U);

  const std::string ranks = copy_of(kGolden + "variants/m2d");
  fs::copy_file(kGolden + "variants/c2_nocoll/__0.metadata", ranks + "/__0.metadata");
  const Checkpoint checkpoint = Checkpoint::open(ranks);
  EXPECT_EQ(checkpoint.leaves.size(), 5U);
  EXPECT_EQ(checkpoint.warnings.size(), 1U);
}

// M12.
TEST(DcpVariant, UnknownTransformsAreRefused) {
  for (const char* name : {"stream.zstd/2", "stream.lz4/1", "stream.zstd/10"}) {
    const std::string directory = copy_of(kGolden + "variants/c_zstd");
    rewrite_metadata(directory, [&](dcp::Metadata& metadata) {
      change_item(metadata, "a", [&](dcp::Item& item) { item.transforms = {name}; });
    });
    EXPECT_EQ(open_code(directory), ErrorCode::unsupported) << name;
  }
}

TEST(DcpVariant, DamagedZstd) {
  const std::string changed = copy_of(kGolden + "variants/c_zstd");
  const int fd = ::open((changed + "/__0_0.distcp").c_str(), O_RDWR);
  ASSERT_EQ(::pwrite(fd, "XXXXXXXX", 8, 453 + 600), 8);
  ::close(fd);
  EXPECT_EQ(read_code(changed), ErrorCode::corrupt);

  const std::string cut = copy_of(kGolden + "variants/c_zstd");
  rewrite_metadata(cut, [](dcp::Metadata& metadata) {
    change_item(metadata, "z", [](dcp::Item& item) { item.length -= 3; });
  });
  EXPECT_EQ(read_code(cut), ErrorCode::incomplete);

  const std::string other = copy_of(kGolden + "variants/c_zstd");
  rewrite_metadata(other, [](dcp::Metadata& metadata) {
    change_item(metadata, "z", [](dcp::Item& item) {
      item.offset += 4;
      item.length -= 4;
    });
  });
  EXPECT_EQ(read_code(other), ErrorCode::corrupt);
}

// M10, D02, D03: an item that is something else than its entry says.
TEST(DcpVariant, ItemsThatAreNotWhatTheyShouldBe) {
  const auto code = [](const std::function<void(dcp::Metadata&)>& change) {
    const std::string directory = copy_of(kGolden + "variants/m2d");
    rewrite_metadata(directory, change);
    return read_code(directory);
  };
  EXPECT_EQ(code([](auto& m) { entry_of(m, "blocks").dtype = DType::int8; }), ErrorCode::corrupt);
  EXPECT_EQ(code([](auto& m) {
              dcp::Item blocks = entry_of(m, "blocks").chunks[0].item;
              change_item(m, "uneven", [&](dcp::Item& item) { std::swap(item, blocks); });
              change_item(m, "blocks", [&](dcp::Item& item) { std::swap(item, blocks); });
            }),
            ErrorCode::corrupt);
  EXPECT_EQ(
      code([](auto& m) { change_item(m, "blocks", [](dcp::Item& item) { item.offset += 64; }); }),
      ErrorCode::corrupt);
  EXPECT_EQ(
      code([](auto& m) { change_item(m, "blocks", [](dcp::Item& item) { item.length -= 64; }); }),
      ErrorCode::incomplete);
}

// D01.
TEST(DcpVariant, DataFilesThatAreMissingCutOrTooLong) {
  const std::string missing = copy_of(kGolden + "variants/m2d");
  fs::remove(missing + "/__1_0.distcp");
  EXPECT_EQ(read_code(missing), ErrorCode::incomplete);
  EXPECT_EQ(verify(missing).findings.size(), 1U);
  const std::string empty = copy_of(kGolden + "variants/m2d");
  fs::resize_file(empty + "/__1_0.distcp", 0);
  EXPECT_EQ(open_code(empty), ErrorCode::incomplete);
  const std::string cut = copy_of(kGolden + "variants/m2d");
  fs::resize_file(cut + "/__1_0.distcp", 4096);
  EXPECT_EQ(open_code(cut), ErrorCode::incomplete);
  const std::string longer = copy_of(kGolden + "variants/m2d");
  fs::resize_file(longer + "/__1_0.distcp", 20000);
  EXPECT_EQ(Checkpoint::open(longer).warnings.size(), 1U);
}

// D07.
TEST(DcpVariant, SomethingElseInADataFilesPlace) {
  const std::string fifo = copy_of(kGolden + "variants/m2d");
  fs::remove(fifo + "/__1_0.distcp");
  ASSERT_EQ(::mkfifo((fifo + "/__1_0.distcp").c_str(), 0600), 0);
  EXPECT_EQ(open_code(fifo), ErrorCode::io);
  const std::string link = copy_of(kGolden + "variants/m2d");
  fs::rename(link + "/__1_0.distcp", link + "/../elsewhere.distcp");
  fs::create_symlink("../elsewhere.distcp", link + "/__1_0.distcp");
  EXPECT_EQ(read_code(link), ErrorCode::unsafe);
  const std::string directory = copy_of(kGolden + "variants/m2d");
  fs::remove(directory + "/__1_0.distcp");
  fs::create_directory(directory + "/__1_0.distcp");
  EXPECT_EQ(open_code(directory), ErrorCode::io);
}

// D06.
TEST(DcpVariant, SafetensorsThatContradictMetadata) {
  const std::string offsets = copy_of(kGolden + "variants/c2_st");
  patch(offsets + "/__1_0.distcp", "\\\"saved_offsets\\\": [3, 0]",
        "\\\"saved_offsets\\\": [2, 0]");
  EXPECT_EQ(open_code(offsets), ErrorCode::corrupt);
  const std::string json = copy_of(kGolden + "variants/c2_st");
  patch(json + "/__1_0.distcp", "\\\"saved_offsets\\\": [3, 0]", "\\\"saved_offsets\\\": {3, 0]");
  EXPECT_EQ(open_code(json), ErrorCode::corrupt);
  const std::string shape = copy_of(kGolden + "variants/c2_st");
  patch(shape + "/__0_0.distcp", "\"shape\":[3,3]", "\"shape\":[9,1]");
  EXPECT_EQ(open_code(shape), ErrorCode::corrupt);
}

// planner_data outlives a conversion: paths with list indices and dots in keys.
TEST(DcpVariant, PathsAreKept) {
  const std::string target = temporary_directory() + "/dcp";
  ConvertOptions options;
  options.to = CheckpointKind::dcp;
  (void)convert(kGolden + "checkpoints/c1", target, options);
  const Checkpoint before = Checkpoint::open(kGolden + "checkpoints/c1");
  const Checkpoint after = Checkpoint::open(target);
  ASSERT_EQ(before.leaves.size(), after.leaves.size());
  for (std::size_t i = 0; i < before.leaves.size(); ++i) {
    EXPECT_EQ(before.leaves[i].name, after.leaves[i].name);
    EXPECT_EQ(before.leaves[i].path, after.leaves[i].path);
  }
}

}  // namespace
}  // namespace tessera
