// Archives of libtorch, and what is in them:
//   libtorch_tool write SEED FOLDER   net.pt and opt.pt by torch::save, of a module drawn by SEED
//   and of its AdamW after
//                                     a step, and net.ref.pt and opt.ref.pt, their tensors by name,
//                                     by torch::pickle_save
//   libtorch_tool read FILE           reads what torch::pickle_load does; prints names, dtypes and
//   sums of tensors, kinds of
//                                     other values, or what the matter is (exit code 1)
#include <algorithm>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <string>

#include <torch/torch.h>

namespace {

using torch::nn::Module;

// Modules of a few kinds, some of which are in two places.
struct DrawnImpl : Module {
  DrawnImpl(std::mt19937& random, int depth) {
    const auto below = [&](std::uint32_t limit) { return random() % limit; };
    const int children = static_cast<int>(below(4));
    for (int i = 0; i < children; ++i) add("child" + std::to_string(i), random, depth);
    if (below(2) == 0) register_parameter("scale", torch::rand({static_cast<int>(below(4))}));
    constexpr c10::ScalarType kTypes[] = {torch::kFloat,    torch::kDouble,      torch::kHalf,
                                          torch::kBFloat16, torch::kInt,         torch::kLong,
                                          torch::kShort,    torch::kChar,        torch::kByte,
                                          torch::kBool,     torch::kComplexFloat};
    for (std::uint32_t i = below(3); i > 0; --i)
      register_buffer("buffer" + std::to_string(i),
                      (torch::rand({3, 2}) * 9).to(kTypes[below(std::size(kTypes))]));
    if (below(4) == 0) register_buffer("turned", torch::rand({3, 4}).t());
  }

  void add(const std::string& name, std::mt19937& random, int depth) {
    switch (random() % (depth > 0 ? 7 : 5)) {
      case 0:
        last_ = register_module(name, torch::nn::Linear(3, 1 + static_cast<int>(random() % 3)));
        return;
      case 1:
        register_module(name, torch::nn::BatchNorm1d(3));
        return;
      case 2:
        register_module(name, torch::nn::Embedding(4, 2));
        return;
      case 3:
        register_module(
            name, torch::nn::Sequential(torch::nn::Linear(2, 2), torch::nn::ReLU(),
                                        torch::nn::LayerNorm(torch::nn::LayerNormOptions({2}))));
        return;
      case 4:
        if (last_) register_module(name, last_);
        return;
      default:
        register_module(name, std::make_shared<DrawnImpl>(random, depth - 1));
    }
  }

  std::shared_ptr<Module> last_;
};
TORCH_MODULE(Drawn);

using Dict = c10::Dict<std::string, at::Tensor>;

void pickle(const Dict& dict, const std::string& path) {
  const std::vector<char> bytes = torch::pickle_save(dict);
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

int write(int seed, const std::string& folder) {
  std::mt19937 random(static_cast<std::uint32_t>(seed));
  torch::manual_seed(seed);
  Drawn net(random, 3);
  torch::save(net, folder + "/net.pt");
  Dict named;
  for (const auto& item : net->named_parameters()) named.insert(item.key(), item.value().detach());
  for (const auto& item : net->named_buffers()) named.insert(item.key(), item.value());
  pickle(named, folder + "/net.ref.pt");

  std::vector<torch::Tensor> parameters;  // each once
  for (const torch::Tensor& parameter : net->parameters()) {
    const auto is_it = [&](const torch::Tensor& known) { return known.is_same(parameter); };
    if (std::none_of(parameters.begin(), parameters.end(), is_it)) parameters.push_back(parameter);
  }
  if (parameters.empty()) return 0;
  const auto middle = parameters.begin() + static_cast<std::ptrdiff_t>((parameters.size() + 1) / 2);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<torch::Tensor>(parameters.begin(), middle));
  groups.emplace_back(std::vector<torch::Tensor>(middle, parameters.end()));
  torch::optim::AdamW optimizer(groups, torch::optim::AdamWOptions(1e-3).amsgrad(seed % 2 == 0));
  for (const torch::Tensor& parameter : parameters)
    if (random() % 4 > 0) parameter.mutable_grad() = torch::rand_like(parameter);
  optimizer.step();
  torch::save(optimizer, folder + "/opt.pt");
  Dict state;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto found = optimizer.state().find(parameters[i].unsafeGetTensorImpl());
    if (found == optimizer.state().end()) continue;
    const auto& of = static_cast<const torch::optim::AdamWParamState&>(*found->second);
    const std::string name = "state." + std::to_string(i) + ".";
    state.insert(name + "exp_avg", of.exp_avg());
    state.insert(name + "exp_avg_sq", of.exp_avg_sq());
    if (of.max_exp_avg_sq().defined()) state.insert(name + "max_exp_avg_sq", of.max_exp_avg_sq());
  }
  pickle(state, folder + "/opt.ref.pt");
  return 0;
}

// Dicts inside of dicts have their names joined; what else there is has its kind.
void print(const std::string& name, const c10::IValue& value) {
  if (value.isGenericDict()) {
    for (const auto& item : value.toGenericDict()) {
      const std::string key = item.key().isString() ? item.key().toStringRef() : "?";
      print(name.empty() ? key : name + "." + key, item.value());
    }
  } else if (value.isTensor()) {
    const torch::Tensor tensor = value.toTensor();
    std::cout << name << " " << tensor.scalar_type() << " "
              << tensor.to(torch::kComplexDouble).sum() << "\n";
  } else {
    std::cout << name << " " << value.tagKind() << "\n";
  }
}

int read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  print("", torch::pickle_load(bytes));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string verb = argc > 2 ? argv[1] : "";
  if (verb == "write" && argc == 4) return write(std::stoi(argv[2]), argv[3]);
  try {
    if (verb == "read") return read(argv[2]);
  } catch (const std::exception& failure) {
    std::cerr << failure.what() << "\n";
    return 1;
  }
  std::cerr << "libtorch_tool write SEED FOLDER | read FILE\n";
  return 2;
}
