// Writes net.pt, tensor.pt, vec.pt, opt.pt and pick.pt of tests/golden/libtorch into the current
// folder, by libtorch 2.13, and opt.pt of tests/golden/libtorch-2.11 by that version:
//   g++ -std=c++20 -I$TORCH/include -I$TORCH/include/torch/csrc/api/include libtorch.cpp
//   -L$TORCH/lib -ltorch -ltorch_cpu -lc10
#include <fstream>

#include <torch/torch.h>

struct NetImpl : torch::nn::Module {
  torch::nn::Linear first = register_module("l", torch::nn::Linear(4, 3));
  torch::nn::Sequential rest = register_module(
      "s", torch::nn::Sequential(torch::nn::Linear(2, 2), torch::nn::BatchNorm1d(2)));
  torch::Tensor counts = register_buffer("buf", torch::arange(5));
};
TORCH_MODULE(Net);

int main() {
  torch::manual_seed(51);
  Net net;
  torch::save(net, "net.pt");
  torch::save(torch::arange(6).reshape({2, 3}), "tensor.pt");
  torch::save(std::vector<torch::Tensor>{torch::ones({2}), torch::zeros({3})}, "vec.pt");
  // After a step of two of its six parameters.
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
  net->first->forward(torch::ones({1, 4})).sum().backward();
  optimizer.step();
  torch::save(optimizer, "opt.pt");
  c10::Dict<std::string, at::Tensor> dict;
  dict.insert("a", torch::ones({2, 2}));
  const std::vector<char> pickled = torch::pickle_save(dict);
  std::ofstream("pick.pt", std::ios::binary)
      .write(pickled.data(), static_cast<std::streamsize>(pickled.size()));
}
