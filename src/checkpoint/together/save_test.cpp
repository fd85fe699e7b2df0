// Saving straight into files and stores, and the same tree back from every kind.
#include <array>

#include "checkpoint/test_support.h"
#include "tessera/tensor_view.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

const std::array<float, 6> kWeights{0, 1, 2, 3, 4, 5};

// Weights that are const, at strides too, beside values.
Value const_tree() {
  const auto weights = ConstTensorView::of(kWeights.data(), DType::float32, {2, 3});
  const auto transposed = ConstTensorView::of(kWeights.data(), DType::float32, {3, 2}, {1, 3});
  return Value::dict({{"model", Value::dict({{"w", weights.tensor()}, {"t", transposed.tensor()}})},
                      {"step", std::size_t{7}},
                      {"betas", Value::tuple({0.9, 0.95})}});
}

// Row-major elements.
std::vector<float> elements(const Checkpoint& checkpoint, const std::string& name) {
  const Shape& shape = checkpoint.tensor(name).shape;
  std::vector<float> memory(static_cast<std::size_t>(numel(shape)));
  checkpoint.read(name, TensorView::of(memory.data(), DType::float32, shape));
  return memory;
}

void expect_saved(const Checkpoint& checkpoint, CheckpointKind kind) {
  EXPECT_EQ(checkpoint.kind, kind);
  EXPECT_EQ(elements(checkpoint, "model.w"), std::vector<float>({0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(elements(checkpoint, "model.t"), std::vector<float>({0, 3, 1, 4, 2, 5}));
  const Value tree = checkpoint.load();
  EXPECT_EQ(tree["step"].as_int(), 7);
  EXPECT_EQ(tree["betas"], Value::tuple({0.9, 0.95}));
  EXPECT_EQ(tree["model"]["t"].as_tensor().shape, Shape({3, 2}));
  EXPECT_EQ(tree.size(), 3U);
  EXPECT_TRUE(verify(checkpoint).findings.empty());
}

constexpr std::array kKinds{
    std::pair("/a.pt", CheckpointKind::torch_file),
    std::pair("/a.safetensors", CheckpointKind::safetensors),
    std::pair("/a", CheckpointKind::dcp),
};

TEST(SaveFile, EveryKindGivesTheTreeBack) {
  const std::string root = temporary_directory();
  for (const auto& [name, kind] : kKinds) {
    save(const_tree(), root + name);  // by its extension
    expect_saved(Checkpoint::open(root + name), kind);
    EXPECT_EQ(code_of([&, at = root + name] { save(const_tree(), at); }),
              ErrorCode::already_exists);
    save(const_tree(), root + name, {.overwrite = true});
    save(const_tree(), root + "/told-" + std::string(to_string(kind)), {.kind = kind});
    expect_saved(Checkpoint::open(root + "/told-" + std::string(to_string(kind))), kind);
  }
  for (const char* name : {"/weights.bin", "/weights.ckpt"}) {
    save(const_tree(), root + name);
    expect_saved(Checkpoint::open(root + name), CheckpointKind::torch_file);
  }
  save(const_tree(), root + "/weights", {.kind = CheckpointKind::safetensors});
  expect_saved(Checkpoint::open(root + "/weights"), CheckpointKind::safetensors);
  save(const_tree(), root + "/folder/", {.kind = CheckpointKind::safetensors});
  expect_saved(Checkpoint::open(root + "/folder/model.safetensors"), CheckpointKind::safetensors);
  // A directory's name is no file's: a run that saved directories with such names goes on so.
  std::filesystem::create_directory(root + "/step.ckpt");
  save(const_tree(), root + "/step.ckpt");
  expect_saved(Checkpoint::open(root + "/step.ckpt"), CheckpointKind::dcp);
}

TEST(SaveFile, OneTreeIsFilledFromEveryKind) {
  const std::string root = temporary_directory();
  for (const auto& [name, kind] : kKinds) {
    save(const_tree(), root + name);
    std::array<float, 6> memory{};
    const auto view = TensorView::of(memory.data(), DType::float32, {2, 3});
    Value tree = Value::dict({{"model", Value::dict({{"w", view.tensor()}})}, {"step", 0}});
    load(tree, root + name);
    EXPECT_EQ(memory, kWeights) << name;
    EXPECT_EQ(tree["step"].as_int(), 7);
    Value fixed = const_tree();
    EXPECT_EQ(code_of([&, at = root + name] { load(fixed, at); }), ErrorCode::invalid_argument);
  }
}

// An allocator that is asked for no bytes may give none.
TEST(SaveFile, ATensorWithoutElementsNeedsNoMemory) {
  const std::string root = temporary_directory();
  const auto nothing =
      ConstTensorView::of(static_cast<const float*>(nullptr), DType::float32, {0, 3});
  const Value tree = Value::dict({{"w", nothing.tensor()}});
  for (const auto& [name, kind] : kKinds) {
    save(tree, root + name);
    EXPECT_EQ(Checkpoint::open(root + name).load().at("w").as_tensor().shape, Shape({0, 3}));
  }
}

TEST(SaveFile, WhatIsNotHereIsRefused) {
  const std::string root = temporary_directory();
  Value half = Value::dict({{"w", counting({4}, Box{{0}, {2}}, 0)}});
  EXPECT_EQ(code_of([&] { save(half, root + "/a.pt"); }), ErrorCode::incomplete);
  half["w"].as_tensor().pieces.push_back({Box{{2}, {2}}, nullptr, 0, {}, 1});
  EXPECT_EQ(code_of([&] { save(half, root + "/a.pt"); }), ErrorCode::incomplete);
  EXPECT_EQ(code_of([&] { save(const_tree(), root + "/a", {.kind = CheckpointKind::rank_files}); }),
            ErrorCode::unsupported);
  run_ranks(2, [&](Group& group) {
    EXPECT_EQ(code_of([&] { save(const_tree(), root + "/a.pt", group); }), ErrorCode::unsupported);
  });
  EXPECT_TRUE(std::filesystem::is_empty(root));
}

// A URL whose store is not built does not become a directory of that name.
TEST(SaveFile, UrlsAreNoPaths) {
  for (const char* url : {"hdfs://host/x", "hdfs://host/x.pt", "hdfs://host/x.safetensors"}) {
    EXPECT_EQ(code_of([&] { save(const_tree(), url); }), ErrorCode::unsupported) << url;
    EXPECT_EQ(code_of([&] { (void)Checkpoint::open(url); }), ErrorCode::unsupported) << url;
  }
  EXPECT_FALSE(std::filesystem::exists("hdfs:"));
}

// Objects of one's own: all that a store needs.
class OwnStore final : public Store {
 public:
  [[nodiscard]] const std::string& name() const override { return name_; }
  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    const std::lock_guard lock(mutex_);
    std::vector<ObjectInfo> found;
    for (const auto& [name, bytes] : objects_)
      if (name.starts_with(prefix)) found.push_back({name, bytes->size()});
    return found;
  }
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(name);
    if (found == objects_.end()) throw Error(ErrorCode::not_found, "no such object");
    return found->second;
  }
  std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                   std::uint64_t) override {
    if (if_exists == IfExists::fail && exists(name))
      throw Error(ErrorCode::already_exists, "there is one already");
    return memory_sink(std::string(name), [this, name = std::string(name)](auto bytes) {
      const std::lock_guard lock(mutex_);
      objects_[name] = memory_source(std::move(bytes), name);
    });
  }
  void remove(std::string_view name) override {
    const std::lock_guard lock(mutex_);
    objects_.erase(std::string(name));
  }

 private:
  const std::string name_ = "own";
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<ByteSource>, std::less<>> objects_;
};

TEST(OwnStore, ServesSaveOpenReadLoadAndConvert) {
  const auto source = std::make_shared<OwnStore>();
  const auto target = std::make_shared<OwnStore>();
  save(const_tree(), source);
  expect_saved(Checkpoint::open(source), CheckpointKind::dcp);
  std::array<float, 6> memory{};
  Value tree = Value::dict(
      {{"model",
        Value::dict({{"w", TensorView::of(memory.data(), DType::float32, {2, 3}).tensor()}})}});
  load(tree, source);
  EXPECT_EQ(memory, kWeights);
  ConvertOptions how;
  convert(source, {target, "sub/a.safetensors"}, how);
  expect_saved(Checkpoint::open({target, "sub/a.safetensors"}), CheckpointKind::safetensors);
  how.to = CheckpointKind::torch_file;
  const ConvertReport report = convert({target, "sub/a.safetensors"}, {target, "b.pt"}, how);
  EXPECT_EQ(report.target, "own/b.pt");
  expect_saved(Checkpoint::open({target, "b.pt"}), CheckpointKind::torch_file);
  EXPECT_EQ(code_of([&] { convert(source, {target, "b.pt"}, how); }), ErrorCode::already_exists);
  how.to = CheckpointKind::dcp;
  convert({target, "b.pt"}, target, how);
  expect_saved(Checkpoint::open(target), CheckpointKind::dcp);
  save(const_tree(), {target, "c.pt"});
  expect_saved(Checkpoint::open({target, "c.pt"}), CheckpointKind::torch_file);
  EXPECT_EQ(code_of([&] { convert(source, {target, "dir"}, how); }), ErrorCode::invalid_argument);
  how.to = CheckpointKind::safetensors;
  EXPECT_EQ(code_of([&] { convert(source, target, how); }), ErrorCode::invalid_argument);
  how.to = CheckpointKind::olmo_full;
  EXPECT_EQ(code_of([&] { convert(source, target, how); }), ErrorCode::already_exists);
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open({target, "absent.pt"}); }), ErrorCode::not_found);
}

}  // namespace
}  // namespace tessera
