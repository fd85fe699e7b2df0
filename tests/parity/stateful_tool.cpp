// Saves and loads objects that give and take their state, by two ranks (threads).
//   stateful_tool save DIRECTORY
//   stateful_tool save-items DIRECTORY   the same, one data file an item
//   stateful_tool save-zstd DIRECTORY    the same and "large", of several windows, compressed
//   stateful_tool save-hooks DIRECTORY   that tree: "model" as "net" in bfloat16, and what both
//                                        ranks hold is written by the second one
//   stateful_tool save-parts DIRECTORY   the same tree, without collectives
//   stateful_tool save-unlike DIRECTORY  a tensor and a value of each rank's own, kept
//   stateful_tool load DIRECTORY     prints what the objects took, a line each
#include <cstring>
#include <iostream>
#include <mutex>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "tessera/data_files.h"
#include "tessera/stateful.h"

namespace {

using namespace tessera;

constexpr int kRanks = 2;
constexpr std::int64_t kRows = 3, kColumns = 2;  // of each rank

// A rank's rows of a weight whose elements are numbered.
class Model : public Stateful {
 public:
  explicit Model(int rank) : first_(rank * kRows), elements_(kRows * kColumns) {}

  void number_elements() {
    std::iota(elements_.begin(), elements_.end(), static_cast<float>(first_ * kColumns));
  }
  // Its state, which owns the elements.
  static Value numbered(int rank) {
    const auto model = std::make_shared<Model>(rank);
    model->number_elements();
    Value state = model->state_dict();
    state.at("weight").as_tensor().pieces[0].storage->owner = model;
    return state;
  }
  [[nodiscard]] const std::vector<float>& elements() const { return elements_; }

  [[nodiscard]] Value state_dict() const override {
    auto storage = std::make_shared<Storage>();
    storage->data = reinterpret_cast<std::byte*>(elements_.data());
    storage->size = elements_.size() * sizeof(float);
    Tensor weight;
    weight.shape = {kRanks * kRows, kColumns};
    weight.sharded = true;
    weight.pieces = {{.slice = Box{{first_, 0}, {kRows, kColumns}},
                      .storage = std::move(storage),
                      .strides = {}}};
    return Value::dict({{"weight", std::move(weight)}});
  }
  void load_state_dict(const Value&) override {}  // the elements are in place

 private:
  std::int64_t first_;
  mutable std::vector<float> elements_;  // a load writes them through state_dict()
};

class Sampler : public Stateful {
 public:
  Sampler(std::int64_t seed, std::string name) : seed_(seed), name_(std::move(name)) {}
  [[nodiscard]] std::string text() const { return std::to_string(seed_) + " " + name_; }

  [[nodiscard]] Value state_dict() const override {
    return Value::dict({{"seed", seed_}, {"name", name_}});
  }
  void load_state_dict(const Value& state) override {
    seed_ = state.at("seed").as_int();
    name_ = state.at("name").as_string();
  }

 private:
  std::int64_t seed_;
  std::string name_;
};

void save_objects(Group& group, const std::string& directory, const SaveOptions& options) {
  Model model(group.rank());
  model.number_elements();
  Sampler sampler(7, "shuffled");
  Value step = 41;
  save({{"model", model}, {"sampler", sampler}, {"step", step}}, directory, options, group);
}

Value tree_with_large(int rank) {
  const std::int64_t rows = 1000, columns = 700;
  const auto numbers = std::make_shared<std::vector<float>>(rows * columns);
  std::iota(numbers->begin(), numbers->end(), 0.0F);
  auto storage = std::make_shared<Storage>();
  storage->data = reinterpret_cast<std::byte*>(numbers->data());
  storage->size = numbers->size() * sizeof(float);
  storage->owner = numbers;
  Tensor large;
  large.shape = {rows, columns};
  large.pieces = {{.slice = whole(large.shape), .storage = std::move(storage), .strides = {}}};
  return Value::dict({{"model", Model::numbered(rank)},
                      {"large", std::move(large)},
                      {"sampler", Sampler(7, "shuffled").state_dict()},
                      {"step", 41}});
}

SaveOptions with_hooks() {
  SaveOptions options;
  options.name = [](const std::string& key) {
    return key.starts_with("model.") ? "net." + key.substr(6) : key;
  };
  options.dtype = [](const std::string& key, const Tensor& tensor) {
    return key.starts_with("net.") ? DType::bfloat16 : tensor.dtype;
  };
  options.writer = [](const std::string&, std::span<const int> holders) { return holders.back(); };
  return options;
}

void save_part_of_objects(int rank, const std::string& directory) {
  Model model(rank);
  model.number_elements();
  save_part(Value::dict({{"model", model.state_dict()},
                         {"sampler", Sampler(7, "shuffled").state_dict()},
                         {"step", 41}}),
            directory, rank);
}

void save_unlike(Group& group, const std::string& directory) {
  const int own = group.rank() + 1;
  std::vector<float> elements(3, static_cast<float>(own));
  auto storage = std::make_shared<Storage>();
  storage->data = reinterpret_cast<std::byte*>(elements.data());
  storage->size = elements.size() * sizeof(float);
  Tensor scale;
  scale.shape = {3};
  scale.pieces = {{.slice = whole(scale.shape), .storage = std::move(storage), .strides = {}}};
  save(Value::dict({{"scale", std::move(scale)}, {"seed", own}}), directory,
       {.values = IfDiffers::keep, .copies = IfDiffers::keep}, group);
}

std::string loaded_objects(Group& group, const std::string& directory) {
  Model model(group.rank());
  Sampler sampler(0, "");
  Value step;
  load({{"model", model}, {"sampler", sampler}, {"step", step}}, directory, group);
  std::string text;
  for (const float element : model.elements())
    text += std::to_string(static_cast<int>(element)) + " ";
  return text + sampler.text() + " " + std::to_string(step.as_int());
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv, argv + argc);
  if (words.size() != 3) return 2;
  std::vector<std::string> lines(kRanks);
  try {
    run_ranks(kRanks, [&](Group& group) {
      if (words[1] == "save") {
        save_objects(group, words[2], {});
      } else if (words[1] == "save-items") {
        save_objects(group, words[2], {.one_file_an_item = true});
      } else if (words[1] == "save-zstd") {
        save(tree_with_large(group.rank()), words[2], {.compression = Compression::zstd}, group);
      } else if (words[1] == "save-hooks") {
        save(tree_with_large(group.rank()), words[2], with_hooks(), group);
      } else if (words[1] == "save-parts") {
        save_part_of_objects(group.rank(), words[2]);
      } else if (words[1] == "save-unlike") {
        save_unlike(group, words[2]);
      } else {
        lines[static_cast<std::size_t>(group.rank())] = loaded_objects(group, words[2]);
      }
    });
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  if (words[1] == "load") {
    for (const std::string& line : lines) std::cout << line << "\n";
  }
  return 0;
}
