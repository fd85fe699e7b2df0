// Directories of torch_checkpointing. Cases K08 and K09 of docs/hostile-cases.md.
#include <gmock/gmock.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/open/kinds.h"
#include "checkpoint/open/testing.h"
#include "checkpoint/test_support.h"
#include "format/pickle/pickle.h"
#include "tessera/copy.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using namespace testing_support;  // NOLINT(google-build-using-namespace)
using testing::HasSubstr;

const std::string kItems = kGolden + "trainers/torch_checkpointing";

void write_bytes(const std::string& path, const Bytes& bytes) {
  write_text(path, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

// A copy of the golden whose metadata `change` has changed.
std::string with_metadata(const std::function<void(Value& metadata)>& change) {
  const std::string directory = copy_of(kItems);
  const std::string text = text_of(directory + "/metadata.pkl");
  Value metadata = pickle::read(std::as_bytes(std::span(text))).value;
  change(metadata);
  write_bytes(directory + "/metadata.pkl", pickle::write(metadata));
  return directory;
}

Value data_of(Value& metadata, const std::string& way) {
  Value groups =
      metadata.at("metadata").at("model").at("nested_path_to_metadata").at("[\"" + way + "\"]");
  return groups.items().at(0).at("sharding_metadata").at("data");
}

TEST(ItemFiles, AreOneTreeOfAllRanks) {
  const Checkpoint checkpoint = Checkpoint::open(kItems);
  EXPECT_EQ(checkpoint.kind, CheckpointKind::rank_files);
  EXPECT_EQ(checkpoint.world_size, 2);
  EXPECT_EQ(checkpoint.files.size(), 5U);
  EXPECT_EQ(checkpoint.names(), (std::vector<std::string>{"model.0.bias", "model.0.weight",
                                                          "model.1.bias", "model.1.weight"}));
  EXPECT_EQ(checkpoint.tensor("model.0.weight").shape, (Shape{5, 4}));
  EXPECT_EQ(checkpoint.tensor("model.0.weight").pieces.size(), 2U);
  EXPECT_EQ(checkpoint.find("step")->value.as_int(), 7);
  EXPECT_TRUE(verify(kItems).findings.empty());
  const std::string file = temporary_directory() + "/all.pt";
  (void)convert(kItems, file, to_torch());
  EXPECT_TRUE(diff(checkpoint, Checkpoint::open(file)).empty());
}

TEST(ItemFiles, AreSealedCopiedAndReplacedAsAWhole) {
  const std::string directory = copy_of(kItems);
  EXPECT_EQ(seal(directory).files, 5U);
  const std::string target = temporary_directory() + "/to";
  EXPECT_EQ(copy(directory, target).files, 6U);
  std::string text = text_of(directory + "/step_1.pt");
  text[text.size() / 2] ^= 1;
  write_text(directory + "/step_1.pt", text);
  EXPECT_FALSE(verify(directory).findings.empty());
  write_text(target + "/notes.txt", "mine");
  const Belonging belongs(*posix_store(target));
  for (const std::string& name : names_in(target))
    EXPECT_EQ(belongs(name), name != "notes.txt") << name;
}

TEST(ItemFiles, K08MetadataThatSaysOtherwise) {
  const std::vector<std::pair<std::function<void(Value&)>, ErrorCode>> cases{
      {[](Value& all) { data_of(all, "0.weight").set_item("dtype", Value("torch.float16")); },
       ErrorCode::corrupt},
      {[](Value& all) {
         data_of(all, "0.weight").set_item("global_shape", Value::list({5, 5}));
       },
       ErrorCode::corrupt},
      {[](Value& all) { all.set_item("world_size", Value(3)); }, ErrorCode::incomplete},
      {[](Value& all) { all.set_item("world_size", Value(1)); }, ErrorCode::corrupt},
      {[](Value& all) { all.set_item("world_size", Value(0)); }, ErrorCode::corrupt},
      {[](Value& all) { all.set_item("world_size", Value(1 << 20)); }, ErrorCode::corrupt},
      {[](Value& all) { all.set_item("version", Value("3.0")); }, ErrorCode::unsupported},
      {[](Value& all) {
         all = Value::dict({{"epoch", 3}});
       },
       ErrorCode::unsupported},
      {[](Value& all) {
         Value ways = all.at("metadata").at("model").at("nested_path_to_metadata");
         ways.set_item("[\"gone\"]", ways.at("[\"0.bias\"]"));
       },
       ErrorCode::corrupt},
      {[](Value& all) {
         all.at("metadata").at("model").set_item("nested_path_to_metadata", Value::dict());
       },
       ErrorCode::corrupt},
      {[](Value& all) {
         Value groups =
             all.at("metadata").at("model").at("nested_path_to_metadata").at("[\"0.bias\"]");
         groups.items().at(0).set_item("ranks", Value::tuple({0}));
       },
       ErrorCode::corrupt},
      {[](Value& all) {
         Value item = all.at("metadata");
         item.set_item("optim", item.at("model"));
       },
       ErrorCode::incomplete},
      {[](Value& all) {
         Value item = all.at("metadata").at("model");
         item.set_item("rank_to_layout_info", Value::dict({{"x", Value::dict()}}));
       },
       ErrorCode::unsupported}};
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const std::string directory = with_metadata(cases[i].first);
    const Error error = error_of([&] { (void)Checkpoint::open(directory); });
    EXPECT_EQ(error.code(), cases[i].second) << i << ": " << error.what();
    EXPECT_THAT(error.path(), HasSubstr(directory)) << i;
  }
  EXPECT_EQ(Checkpoint::open(with_metadata([](Value&) {})).leaves.size(), 5U);
}

TEST(ItemFiles, K08MetadataThatIsDamaged) {
  const std::string directory = copy_of(kItems);
  const std::string sound = text_of(directory + "/metadata.pkl");
  for (const std::string& text :
       {std::string(), sound.substr(0, sound.size() / 2), std::string("cos\nsystem\n(S'x'\ntR."),
        std::string("\x80\x04}.")}) {
    write_text(directory + "/metadata.pkl", text);
    EXPECT_THROW((void)Checkpoint::open(directory), Error) << text;
  }
  write_text(directory + "/metadata.pkl", "cos\nsystem\n(S'x'\ntR.");
  EXPECT_EQ(open_code(directory), ErrorCode::unsafe);
}

TEST(ItemFiles, K09RanksThatAreMissingOrDiffer) {
  std::string directory = copy_of(kItems);
  fs::remove(directory + "/model_1.pt");
  const Error error = error_of([&] { (void)Checkpoint::open(directory); });
  EXPECT_EQ(error.code(), ErrorCode::incomplete);
  EXPECT_THAT(error.message(), HasSubstr("model_1.pt"));
  directory = copy_of(kItems);
  fs::remove(directory + "/step_0.pt");
  EXPECT_EQ(open_code(directory), ErrorCode::incomplete);
  directory = copy_of(kItems);
  save(Value::dict({{"at", 8}}), directory + "/step_1.pt", {.overwrite = true});
  EXPECT_EQ(open_code(directory), ErrorCode::mismatch);
  directory = copy_of(kItems);
  fs::copy(directory + "/model_0.pt", directory + "/model_2.pt");
  EXPECT_EQ(open_code(directory), ErrorCode::corrupt);
  // Nothing says what they are.
  directory = copy_of(kItems);
  fs::remove(directory + "/metadata.pkl");
  EXPECT_EQ(open_code(directory), ErrorCode::not_found);
}

}  // namespace
}  // namespace tessera
