// Trees with more than names can say, through files of names and back (issue 15, 3.2 to 3.5).
#include "checkpoint/open/tree_json.h"
#include "checkpoint/read/side_file.h"
#include "checkpoint/test_support.h"
#include "format/torch/torch_file.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

Value numbers(float first, bool parameter = false) {
  Tensor tensor = counting({3}, whole({3}), first);
  tensor.sharded = false;
  tensor.parameter = parameter;
  tensor.requires_grad = parameter;
  return Value(std::move(tensor));
}

std::string torch_file_of(const Value& tree) {
  const std::string path = temporary_directory() + "/x.pt";
  const auto bytes = torch_file::write(tree, "x");
  write_text(path, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  return path;
}

// `source` through a file of another kind and back into a file of torch.save.
std::string there_and_back(const std::string& source, CheckpointKind kind) {
  ConvertOptions options;
  const std::string root = temporary_directory();
  const std::string middle = root + (kind == CheckpointKind::dcp          ? "/dcp"
                                     : kind == CheckpointKind::torch_file ? "/a.pt"
                                                                          : "/a.safetensors");
  options.to = kind;
  convert(source, middle, options);
  EXPECT_TRUE(diff(Checkpoint::open(source), Checkpoint::open(middle)).empty());
  EXPECT_TRUE(verify(middle).findings.empty());
  options = {};
  options.to = CheckpointKind::torch_file;
  convert(middle, root + "/b.pt", options);
  return root + "/b.pt";
}

void expect_same(const std::string& a, const std::string& b) {
  const Value x = Checkpoint::open(a).tree();
  const Value y = Checkpoint::open(b).tree();
  EXPECT_EQ(x, y);
  for (const Difference& difference : diff(Checkpoint::open(a), Checkpoint::open(b)))
    ADD_FAILURE() << to_string(difference.kind) << " " << difference.name << " " << difference.text;
}

// Everything that a name does not tell of the dicts on the way to a leaf.
Value typed_tree() {
  Value ordered = Value::dict({{"w", numbers(0, true)}, {"b", numbers(3)}}, DictKind::ordered_dict);
  ordered.set_container_state(Value::dict({{"_metadata", Value::dict({{"", 1}})}}));
  Value with_default = Value::dict({{"k", numbers(5)}}, DictKind::default_dict);
  with_default.set_default_factory(Value::global("builtins", "list"));
  return Value::dict({{"model", ordered},
                      {"state", Value::dict({{Value(0), Value::dict({{"step", numbers(6)}})},
                                             {Value(1), Value::dict()},
                                             {Value(true), Value(1)}})},
                      {"odd", Value::dict({{Value(), Value(1)},
                                           {Value(2.5), numbers(7)},
                                           {Value::tuple({Value(1), Value("a")}), Value(2)}})},
                      {"default", with_default},
                      {"holes", Value::list({Value(1), Value::dict(), Value(2), Value::dict()})},
                      {"empty", Value::dict({}, DictKind::ordered_dict)}});
}

TEST(Trees, TypesOfKeysDictsAndParametersSurvive) {
  const std::string source = torch_file_of(typed_tree());
  expect_same(source, there_and_back(source, CheckpointKind::safetensors));
  expect_same(source, there_and_back(source, CheckpointKind::dcp));
  ConvertOptions options;
  options.to = CheckpointKind::torch_file;
  options.dtype = DType::bfloat16;
  const std::string halves = temporary_directory() + "/h.pt";
  convert(source, halves, options);
  const Value tree = Checkpoint::open(halves).tree();
  EXPECT_TRUE(tree.at("state").pairs().at(0).first == Value(0));
  EXPECT_TRUE(tree.at("model").at("w").as_tensor().parameter);
  EXPECT_EQ(tree.at("model").dict_kind(), DictKind::ordered_dict);
}

TEST(Trees, ARenamedPartKeepsItsTypes) {
  ConvertOptions options;
  options.only = {"state.*", "model.*"};
  options.rename = {"^state=>moved.state", "^model\\.w=>model.v"};
  const std::string target = temporary_directory() + "/a.safetensors";
  convert(torch_file_of(typed_tree()), target, options);
  const Value renamed = Checkpoint::open(target).tree();
  EXPECT_EQ(renamed.at("moved").at("state").pairs().at(0).first, Value(0));
  EXPECT_EQ(renamed.at("model").dict_kind(), DictKind::ordered_dict);
  EXPECT_NE(renamed.at("model").find("v"), nullptr);
}

TEST(Trees, DiffComparesTypesWhereBothHaveThem) {
  const auto text = [](const Value& a, const Value& b) {
    std::string all;
    for (const Difference& difference :
         diff(Checkpoint::open(torch_file_of(a)), Checkpoint::open(torch_file_of(b))))
      all += std::string(to_string(difference.kind)) + " " + difference.name + " " +
             difference.text + "; ";
    return all;
  };
  EXPECT_EQ(text(Value::dict({{Value(0), numbers(0)}}), Value::dict({{"0", numbers(0)}})),
            "type 0 key 0 / key '0'; ");
  EXPECT_EQ(text(Value::dict({{"d", Value::dict({{"x", 1}, {"y", 2}})}}),
                 Value::dict({{"d", Value::dict({{"x", 1}, {"y", 2}}, DictKind::ordered_dict)}})),
            "type d dict / OrderedDict; ");
  EXPECT_EQ(text(Value::dict({{"w", numbers(0)}}), Value::dict({{"w", numbers(0, true)}})),
            "type w Tensor / Parameter that requires grad; ");
  EXPECT_EQ(text(typed_tree(), typed_tree()), "");
}

// Holes of lists: what PyTorch's rule leaves out is an empty dict and nothing else.
TEST(Trees, HolesOfAListAreEmptyDicts) {
  std::vector<Leaf> leaves = {{"l.1", {"l", std::int64_t{1}}, 1},
                              {"l.3", {"l", std::int64_t{3}}, 2}};
  EXPECT_EQ(fill_holes(leaves), (std::vector<std::string>{"l.0", "l.2"}));
  EXPECT_EQ(unflatten(leaves),
            Value::dict({{"l", Value::list({Value::dict(), Value(1), Value::dict(), Value(2)})}}));
  std::vector<Leaf> wild = {{"l.x", {"l", std::int64_t{1} << 40}, 1}};
  EXPECT_TRUE(fill_holes(wild).empty());
  EXPECT_EQ(code_of([&] { (void)unflatten(wild); }), ErrorCode::incomplete);
  // A save by ranks leaves them out of `.metadata` as PyTorch does; the side file has them.
  const std::string directory = temporary_directory() + "/dcp";
  const auto group = solo_group();
  save(Value::dict({{"l", Value::list({Value(1), Value::dict(), Value(2)})}}), directory, *group);
  const auto expect_tree = [](const Checkpoint& saved) {
    EXPECT_EQ(saved.tree().at("l"), Value::list({Value(1), Value::dict(), Value(2)}));
    EXPECT_EQ(saved.find("l.1")->value, Value::dict());
  };
  const Checkpoint whole = Checkpoint::open(directory);
  expect_tree(whole);
  EXPECT_TRUE(whole.warnings.empty());
  const auto store = posix_store(directory);
  for (const ObjectInfo& file : store->list())
    if (is_side_file_name(file.name)) store->remove(file.name);
  const Checkpoint bare = Checkpoint::open(directory);
  expect_tree(bare);
  ASSERT_EQ(bare.warnings.size(), 1U);
  EXPECT_NE(bare.warnings[0].find("l.1"), std::string::npos);
}

TEST(Trees, EqualNamesAreAConflictOfFlatTargetsOnly) {
  const Value tree = Value::dict({{"a.b", numbers(0)},
                                  {"a", Value::dict({{"b", numbers(3)}})},
                                  {Value(0), numbers(6)},
                                  {"0", numbers(9)},
                                  {"['a.b']", Value(1)}});
  const std::string source = torch_file_of(tree);
  const Checkpoint checkpoint = Checkpoint::open(source);
  std::string names;
  for (const Leaf& leaf : checkpoint.leaves) names += leaf.name + " ";
  EXPECT_EQ(names, "['a.b'] ['a']['b'] [0] ['0'] ['[\\'a.b\\']'] ");
  EXPECT_TRUE(verify(source).findings.empty());
  expect_same(source, there_and_back(source, CheckpointKind::torch_file));
  ConvertOptions options;
  options.dtype = DType::bfloat16;
  options.to = CheckpointKind::torch_file;
  const std::string root = temporary_directory();
  convert(source, root + "/h.pt", options);
  const Value halves = Checkpoint::open(root + "/h.pt").tree();
  EXPECT_EQ(halves.size(), 5U);
  options = {};
  EXPECT_EQ(code_of([&] { convert(source, root + "/a.safetensors", options); }),
            ErrorCode::conflict);
  options.to = CheckpointKind::dcp;
  EXPECT_EQ(code_of([&] { convert(source, root + "/dcp", options); }), ErrorCode::conflict);
}

TEST(Trees, TensorsInsideOfValuesHaveNamesOfTheirOwn) {
  const Value shared = numbers(0, true);
  const Value tree =
      Value::dict({{"t", Value::tuple({shared, Value::list({numbers(3), Value(1)})})},
                   {"o", Value::object({.callable = Value::global("m", "C"),
                                        .arguments = Value::tuple(),
                                        .by_new = true,
                                        .state = Value::dict({{"w", shared}, {"x", numbers(6)}})})},
                   {"t.0", Value(1)}});
  const std::string source = torch_file_of(tree);
  const std::string target = temporary_directory() + "/a.safetensors";
  EXPECT_EQ(convert(source, target).tensors, 3U);
  const std::string text = text_of(target);
  for (const char* name : {"\"t.0~1\":{", "\"t.1.0\":{", "\"o.state.x\":{"})
    EXPECT_NE(text.find(name), std::string::npos) << name;
  const Value back = Checkpoint::open(target).tree();
  EXPECT_EQ(back.at("t").items()[0].identity(), back.at("o").as_object().state->at("w").identity());
  EXPECT_TRUE(back.at("t").items()[0].as_tensor().parameter);
  expect_same(source, there_and_back(source, CheckpointKind::safetensors));
  expect_same(source, there_and_back(source, CheckpointKind::dcp));
  ConvertOptions set;
  set.max_shard_size = 12;
  const std::string directory = temporary_directory() + "/set";
  convert(source, directory, set);
  EXPECT_TRUE(verify(directory).findings.empty());
  EXPECT_TRUE(diff(Checkpoint::open(source), Checkpoint::open(directory)).empty());
}

// A tree of before the types: what Tessera 0.1 wrote, by hand.
TEST(Trees, EntriesOfBeforeAreRead) {
  std::vector<Leaf> leaves = {{"s.0", Path{"s.0"}, numbers(0)}};
  EXPECT_FALSE(add_from_metadata(
      {{kTreeKey, R"({"version":1,"leaves":[{"path":["s","0"]},{"path":["l",1],"value":2}]})"}},
      leaves));
  ASSERT_EQ(leaves.size(), 2U);
  EXPECT_EQ(leaves[0].path, (Path{"s", "0"}));
  EXPECT_EQ(leaves[1].value, Value(2));
}

TEST(Trees, ADamagedEntryIsCorrupt) {
  for (const char* entry :
       {R"({"version":1,"leaves":[],"containers":[{"path":[],"kind":"Counter"}]})",
        R"({"version":2,"leaves":[{"path":["a"],"value":{"tensor":"gone"}}]})",
        R"({"version":1,"leaves":[{"path":[{"no":1}],"value":1}]})",
        R"({"version":1,"leaves":[{"path":["w"],"parameter":3}]})"}) {
    std::vector<Leaf> leaves = {{"w", Path{"w"}, numbers(0)}};
    EXPECT_EQ(code_of([&] {
                add_from_metadata({{kTreeKey, entry}}, leaves);
              }),
              ErrorCode::corrupt)
        << entry;
  }
  std::vector<Leaf> leaves;
  EXPECT_EQ(code_of([&] {
              add_from_metadata({{kTreeKey, R"({"version":3,"leaves":[]})"}}, leaves);
            }),
            ErrorCode::unsupported);
}

}  // namespace
}  // namespace tessera
