#include "tessera/checkpointer.h"

#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/torch.h>

#include <array>
#include <cstring>
#include <mutex>
#include <optional>

#include "base/crc32.h"
#include "tessera/error.h"
#include "torch/tensor.h"

namespace tessera {
namespace {

constexpr const char* kTorch = "torch";
constexpr const char* kCuda = "cuda";

std::optional<at::Generator> cuda_generator() {
  if (!at::globalContext().hasCUDA()) return std::nullopt;
  const auto device = c10::impl::getDeviceGuardImpl(at::kCUDA)->getDevice();
  return at::globalContext().defaultGenerator(device);
}

at::Generator cpu_generator() {
  return at::globalContext().defaultGenerator(at::kCPU);
}

at::Tensor state_of(const at::Generator& generator) {
  at::Generator locked = generator;
  const std::scoped_lock lock(locked.mutex());
  return locked.get_state();
}

void set_state(at::Generator generator, const at::Tensor& state, const char* key) {
  const std::scoped_lock lock(generator.mutex());
  try {
    generator.set_state(state);
  } catch (const c10::Error& error) {
    throw Error(ErrorCode::corrupt, "the bytes are no state of a random number generator: " +
                                        std::string(error.what_without_backtrace()))
        .at_key(key);
  }
}

// The bytes under `key`; none: there are none.
std::optional<at::Tensor> bytes_at(const Value& state, const char* key) {
  if (!state.is(Value::Kind::dict))
    throw Error(ErrorCode::mismatch, "the states of random number generators are no dict");
  const Value* found = state.find(key);
  if (found == nullptr) return std::nullopt;
  if (!found->is(Value::Kind::tensor) || found->as_tensor().dtype != DType::uint8 ||
      found->as_tensor().shape.size() != 1) {
    throw Error(ErrorCode::mismatch, "a generator's state is not a row of uint8").at_key(key);
  }
  if (numel(found->as_tensor().shape) == 0) return std::nullopt;
  return tensor_of(found->as_tensor());
}

std::uint32_t seed_for(const at::Tensor& state, int rank) {
  const auto bytes = state.contiguous();
  const auto* data = static_cast<const std::byte*>(bytes.const_data_ptr());
  std::array<std::byte, 4> suffix{};
  for (std::size_t i = 0; i < suffix.size(); ++i)
    suffix[i] = static_cast<std::byte>(static_cast<std::uint32_t>(rank) >> (8 * i));
  return crc32(suffix, crc32({data, static_cast<std::size_t>(bytes.numel())}));
}

// The state of a generator of the same kind that begins with a seed.
at::Tensor seeded(const at::Generator& kind, std::uint32_t seed) {
  at::Generator fresh = kind.clone();
  fresh.set_current_seed(seed);
  return fresh.get_state();
}

}  // namespace

Value random_state(const Value& before) {
  auto state = Value::dict(before.pairs());
  state.set_item(kTorch, leaf_of(state_of(cpu_generator())));
  const auto cuda = cuda_generator();
  state.set_item(kCuda, leaf_of(cuda ? state_of(*cuda) : at::empty({0}, at::kByte)));
  return state;
}

void set_random_state(const Value& state) {
  const auto cpu = bytes_at(state, kTorch);
  const auto device_bytes = bytes_at(state, kCuda);
  if (cpu) set_state(cpu_generator(), *cpu, kTorch);
  const auto cuda = cuda_generator();
  if (cuda && device_bytes) set_state(*cuda, *device_bytes, kCuda);
}

Value derived_random_state(const Value& state, int rank) {
  const auto cpu = bytes_at(state, kTorch);
  const auto device_bytes = bytes_at(state, kCuda);
  if (rank == 0) return state;
  auto derived = Value::dict();
  if (cpu) derived.set_item(kTorch, leaf_of(seeded(cpu_generator(), seed_for(*cpu, rank))));
  const auto cuda = cuda_generator();
  if (cuda && device_bytes)
    derived.set_item(kCuda, leaf_of(seeded(*cuda, seed_for(*device_bytes, rank))));
  return derived;
}

}  // namespace tessera
