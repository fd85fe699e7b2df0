// Blocks that ordinary models do not have: complex numbers, odd memory, exceptions.
#include <stdexcept>
#include <utility>

#include "generated/model.h"
#include "tessera/activation_checkpoint.h"

namespace tessera::generated {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

class FourierImpl : public nn::Module {
 public:
  explicit FourierImpl(int width) { mix_ = register_module("mix", nn::Linear(width, width)); }
  // [..., width] to width / 2 + 1 complex numbers.
  Tensor forward(const Tensor& x) {
    return torch::fft::rfft(call_module(mix_, x).to(
        x.scalar_type() == torch::kDouble ? torch::kDouble : torch::kFloat));
  }

 private:
  nn::Linear mix_{nullptr};
};
TESSERA_MODULE(Fourier);

struct ComplexResultBlock : BlockImpl {
  Fourier spectrum{nullptr};
  explicit ComplexResultBlock(int width) { spectrum = register_module("spectrum", Fourier(width)); }
  Tensor forward(const Tensor& x, const Route& route) override {
    const auto z = route.plain ? call_module(spectrum, x) : activation_checkpoint(spectrum, x);
    return x + torch::tanh(torch::fft::irfft(z * z.conj(), x.size(-1))).to(x.scalar_type());
  }
};

Tensor as_complex(const Tensor& x) {
  const auto real = x.to(torch::kFloat);
  return torch::complex(real, torch::zeros_like(real));
}

struct ComplexBlock : BlockImpl {
  Tensor weight, phase;
  explicit ComplexBlock(int width) {
    weight = register_parameter("weight", torch::ones({width, width}, torch::kComplexFloat));
    phase = register_parameter("phase", torch::ones({width}, torch::kComplexFloat));
  }
  Tensor forward(const Tensor& x, const Route&) override {
    const auto z = torch::matmul(as_complex(x), weight) * phase;
    return x + torch::real(z) * torch::imag(z);
  }
};

struct ConjugateBlock : BlockImpl {
  Tensor stored, used, part;
  explicit ConjugateBlock(int width) {
    const auto one = torch::ones({width}, torch::kComplexFloat);
    stored = register_parameter("stored", one.clone().conj());  // whose memory is the conjugate
    used = register_parameter("used", one.clone());
    part = register_parameter("part", one.clone());
  }
  Tensor forward(const Tensor& x, const Route&) override {
    const auto z = as_complex(x) * stored * used.conj();
    return x + torch::imag(z) + x * torch::imag(part.conj());
  }
};

struct StridedBlock : BlockImpl {
  Tensor turned, sliced, kernel;
  explicit StridedBlock(int width) {
    turned = register_parameter("turned", torch::ones({width + 1, width}).t());
    sliced =
        register_parameter("sliced", torch::ones({width, 2 * width}).slice(1, 0, 2 * width, 2));
    kernel = register_parameter(
        "kernel", torch::ones({width, width, 1, 3}).contiguous(at::MemoryFormat::ChannelsLast));
  }
  Tensor forward(const Tensor& x, const Route&) override {
    const auto wide = torch::tanh(torch::matmul(x, turned));
    const auto narrow = torch::matmul(wide.narrow(-1, 0, x.size(-1)), sliced);
    const auto image = x.transpose(1, 2).unsqueeze(2);
    const auto moved = torch::conv2d(image, kernel, {}, 1, torch::IntArrayRef({0, 1}));
    return x + torch::tanh(narrow) + torch::tanh(moved.squeeze(2).transpose(1, 2));
  }
};

struct ThrowingBlock : BlockImpl {
  nn::Linear first{nullptr}, second{nullptr};
  explicit ThrowingBlock(int width) {
    first = register_module("first", nn::Linear(width, width));
    second = register_module("second", nn::Linear(width, width));
  }
  Tensor forward(const Tensor& x, const Route& route) override {
    const auto y = torch::tanh(call_module(first, x));
    if (route.throw_inside) throw std::runtime_error("bad batch");
    return x + call_module(second, y);
  }
};

// FSDP2 lets no unit do this.
class ChangerImpl : public nn::Module {
 public:
  explicit ChangerImpl(int width) {
    scale_ = register_parameter("scale", torch::ones({width}));
    mix_ = register_module("mix", nn::Linear(width, width));
  }
  Tensor forward(Tensor x) {
    x.mul_(scale_).add_(scale_.square());
    return torch::tanh(call_module(mix_, x));
  }

 private:
  Tensor scale_;
  nn::Linear mix_{nullptr};
};
TESSERA_MODULE(Changer);

struct InPlaceBlock : BlockImpl {
  Changer changer{nullptr};
  explicit InPlaceBlock(int width) { changer = register_module("changer", Changer(width)); }
  Tensor forward(const Tensor& x, const Route&) override {
    const auto mine = x * 0.5;
    const auto changed = call_module(changer, mine);
    return x + changed + torch::sin(mine);
  }
};

}  // namespace

BlockPointer make_feature_block(BlockKind kind, int width) {
  switch (kind) {
    case BlockKind::complex_result:
      return std::make_shared<ComplexResultBlock>(width);
    case BlockKind::complex_parameters:
      return std::make_shared<ComplexBlock>(width);
    case BlockKind::conjugates:
      return std::make_shared<ConjugateBlock>(width);
    case BlockKind::strided:
      return std::make_shared<StridedBlock>(width);
    case BlockKind::thrower:
      return std::make_shared<ThrowingBlock>(width);
    case BlockKind::in_place:
      return std::make_shared<InPlaceBlock>(width);
    default:
      throw std::logic_error("no such block");
  }
}

}  // namespace tessera::generated
