#include "optim_state/steady.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "optim_state/training_tree.h"
#include "tessera/error.h"
#include "tessera/fsdp.h"
#include "tessera/leaf.h"
#include "torch/tensor.h"

namespace tessera::detail {
namespace {

// Addresses of bytes, of whatever device: no two have the same.
struct Range {
  std::uint64_t begin = 0, end = 0;
};

std::uint64_t address_of(const void* bytes) {
  return reinterpret_cast<std::uintptr_t>(bytes);
}

Range range_of(const at::Tensor& tensor) {
  const auto begin = address_of(tensor.storage().data());
  return {begin, begin + tensor.storage().nbytes()};
}

Range range_of(const Storage& storage) {
  const auto begin =
      storage.device ? std::uint64_t{storage.device->address()} : address_of(storage.data);
  return {begin, begin + storage.size};
}

// Ranges that may overlap one another.
class Ranges {
 public:
  void add(Range range) { ranges_.push_back(range); }
  void sort() {
    std::ranges::sort(ranges_, {}, &Range::begin);
    std::vector<Range> joined;
    for (const auto& range : ranges_) {
      if (!joined.empty() && range.begin <= joined.back().end) {
        joined.back().end = std::max(joined.back().end, range.end);
      } else {
        joined.push_back(range);
      }
    }
    ranges_ = std::move(joined);
  }
  // Once they are sorted.
  [[nodiscard]] bool cover(const Range& range) const {
    const auto* last = last_from(range.begin);
    return last != nullptr && range.end <= last->end;
  }
  [[nodiscard]] bool meet(const Range& range) const {
    const auto* last = range.end == 0 ? nullptr : last_from(range.end - 1);
    return last != nullptr && range.begin < last->end;
  }

 private:
  // The last one that begins at `address` or before.
  [[nodiscard]] const Range* last_from(std::uint64_t address) const {
    const auto after = std::ranges::upper_bound(ranges_, address, {}, &Range::begin);
    return after == ranges_.begin() ? nullptr : &*std::prev(after);
  }

  std::vector<Range> ranges_;
};

// What libtorch does not count: writes through data() or data_ptr(), and by collectives in place.
// So bytes of the host's tensors are kept, here and there, and compared: two pieces of each tensor,
// and some over all bytes alike. A change of all elements of a tensor does not miss them; one of a
// few elements may.
class ByteSamples {
 public:
  // `number`: what changed() says of it.
  void add(const at::Tensor& tensor, std::size_t number) {
    const Range all = range_of(tensor);
    if (!tensor.is_cpu() || tensor.numel() == 0 || all.begin == all.end) return;
    Span span{.storage = tensor.storage().getWeakStorageImpl(),
              .all = all,
              .begin = static_cast<const std::byte*>(tensor.const_data_ptr()),
              .size = tensor.nbytes(),
              .number = number};
    if (tensor.is_non_overlapping_and_dense()) {
      bytes_ += span.size;
    } else {  // between its elements there is what is not its own
      span.sizes = tensor.sizes().vec();
      span.strides = tensor.strides().vec();
      span.size = tensor.element_size();
    }
    spans_.push_back(std::move(span));
  }
  // When all are added.
  void take() {
    constexpr std::uint64_t kOverAll = 2048;
    for (std::size_t i = 0; i < spans_.size(); ++i) {
      add_sample(i, somewhere_in(spans_[i]));
      add_sample(i, somewhere_in(spans_[i]));
    }
    std::uint64_t before = 0;  // bytes of dense spans before `at`
    std::size_t at = 0;
    for (std::uint64_t i = 0; bytes_ > 0 && i < kOverAll; ++i) {
      const auto place = bytes_ * i / kOverAll + below(bytes_ / kOverAll + 1);
      while (at < spans_.size() && place - before >= dense_size(spans_[at]))
        before += dense_size(spans_[at++]);
      if (at < spans_.size()) add_sample(at, place - before);
    }
  }
  // The number of a tensor whose bytes are others now. What was freed or resized has not changed.
  [[nodiscard]] std::optional<std::size_t> changed() const {
    for (const auto& [span, at, size, bytes] : samples_) {
      const auto storage = spans_[span].storage.lock();
      if (!storage || !is_same(*storage, spans_[span].all)) continue;
      if (std::memcmp(spans_[span].begin + at, bytes.data(), size) != 0) return spans_[span].number;
    }
    return std::nullopt;
  }

 private:
  struct Span {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // nothing holds the memory
    Range all;                                          // of the storage
    const std::byte* begin = nullptr;                   // of the tensor
    std::uint64_t size = 0;                             // all of it, or with strides one element
    std::size_t number = 0;
    std::vector<std::int64_t> sizes = {}, strides = {};  // none: it is dense
  };
  struct Sample {
    std::size_t span = 0;
    std::uint64_t at = 0;
    std::size_t size = 0;
    std::array<std::byte, 64> bytes = {};
  };

  static bool is_same(const c10::StorageImpl& storage, const Range& all) {
    return address_of(storage.data()) == all.begin && storage.nbytes() == all.end - all.begin;
  }
  static std::uint64_t dense_size(const Span& span) { return span.sizes.empty() ? span.size : 0; }
  [[nodiscard]] std::uint64_t below(std::uint64_t end) {
    return std::uniform_int_distribution<std::uint64_t>(0, end - 1)(random_);
  }
  [[nodiscard]] std::uint64_t somewhere_in(const Span& span) {
    if (span.sizes.empty()) return below(span.size);
    std::uint64_t element = 0;
    for (std::size_t d = 0; d < span.sizes.size(); ++d) {
      const auto index = below(static_cast<std::uint64_t>(span.sizes[d]));
      element += index * static_cast<std::uint64_t>(span.strides[d]);
    }
    return element * span.size;
  }
  // A piece with the byte `at` in it: of a small tensor all.
  void add_sample(std::size_t number, std::uint64_t at) {
    const Span& span = spans_[number];
    Sample& sample = samples_.emplace_back(Sample{.span = number, .at = at});
    sample.size = std::min<std::uint64_t>(sample.bytes.size(), span.size);
    if (span.sizes.empty()) sample.at = std::min(at, span.size - sample.size);
    std::memcpy(sample.bytes.data(), span.begin + sample.at, sample.size);
  }

  std::minstd_rand random_{std::random_device{}()};
  std::vector<Span> spans_;
  std::uint64_t bytes_ = 0;  // of those that are dense
  std::vector<Sample> samples_;
};

class SteadyTensors {
 public:
  void add_parameters(const Path& place, ModuleRef model) {
    for (const auto& parameter : sharded_parameters(model)) {
      // Of others nobody counts changes.
      if (!parameter.local.defined() || parameter.local.is_inference()) continue;
      steady_.add(range_of(parameter.local));
      auto path = below(place, kModel);
      path.emplace_back(parameter.name());
      watch(dotted(path), parameter.local);
      if (parameter.local.requires_grad()) trained_.insert(parameter.local.unsafeGetTensorImpl());
    }
    for (const auto& buffer : model.get().buffers()) {
      if (buffer.defined() && buffer.has_storage()) moving_.add(range_of(buffer));
    }
  }
  void add_moments(const Path& place, const std::vector<at::Tensor>& moments) {
    for (const auto& moment : moments) {
      if (moment.is_inference()) continue;
      steady_.add(range_of(moment));
      watch(dotted(below(place, kOptim)), moment);
    }
  }
  void add_awaited(const std::vector<std::vector<at::Tensor>>& groups) {
    for (const auto& group : groups) {
      for (const auto& parameter : group) awaited_.insert(parameter.unsafeGetTensorImpl());
    }
  }
  void add_values(const Value& values) {
    for (const auto& leaf : leaves_of(values)) {
      if (!leaf.value.is(Value::Kind::tensor)) continue;
      for (const auto& piece : leaf.value.as_tensor().pieces) {
        if (piece.storage) moving_.add(range_of(*piece.storage));
      }
    }
  }
  // When all are added.
  void begin() {
    steady_.sort();
    moving_.sort();
    for (std::size_t i = 0; i < tensors_.size(); ++i)
      if (!moving_.meet(range_of(tensors_[i]))) samples_.add(tensors_[i], i);
    tensors_.clear();
    samples_.take();
  }

  [[nodiscard]] bool has(const Storage& storage) const {
    const auto range = range_of(storage);
    return storage.size > 0 && steady_.cover(range) && !moving_.meet(range);
  }
  // What no optimizer of the state trains, another one may.
  [[nodiscard]] bool is_all_awaited() const {
    return std::ranges::all_of(trained_,
                               [&](const auto* tensor) { return awaited_.contains(tensor); });
  }
  void require_unchanged() const {
    for (const auto& [name, counter, version] : watched_) {
      if (counter.current_version() != version) throw_changed(name);
    }
    if (const auto changed = samples_.changed()) throw_changed(watched_[*changed].name);
  }

 private:
  // A tensor's count of changes, which is that of all views of it: nothing holds the tensor.
  struct Watched {
    std::string name;
    c10::VariableVersion counter;
    std::uint32_t version;
  };
  using Tensors = std::unordered_set<const c10::TensorImpl*>;

  void watch(std::string name, const at::Tensor& tensor) {
    watched_.push_back({std::move(name), counter_of(tensor), tensor._version()});
    tensors_.push_back(tensor);
  }
  [[noreturn]] static void throw_changed(const std::string& name) {
    throw Error(ErrorCode::conflict,
                "was changed while a save in the background copied it: what is not a step of "
                "tessera::AdamW has to call PendingSave::await_staged() before "
                "(WriterOptions::overlap)")
        .at_key(name);
  }
  static c10::VariableVersion counter_of(const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->version_counter();
  }

  Ranges steady_, moving_;
  Tensors trained_, awaited_;  // to be compared before tensors end
  std::vector<Watched> watched_;
  std::vector<at::Tensor> tensors_;  // of watched_, until begin()
  ByteSamples samples_;
};

}  // namespace

SteadyMemory steady_memory(const TrainingState& state) {
  const auto tensors = std::make_shared<SteadyTensors>();
  bool is_awaited = true;
  for (const auto& [one, place] : placed(state)) {
    tensors->add_parameters(place, one.model());
    tensors->add_values(one.values);
    tensors->add_values(one.rank_values);
    const auto moments = one.optimizer() ? one.optimizer()->access().awaited_state() : std::nullopt;
    is_awaited = is_awaited && moments.has_value();
    if (!moments) continue;
    tensors->add_moments(place, *moments);
    tensors->add_awaited(one.optimizer()->access().parameters());
  }
  is_awaited = is_awaited && tensors->is_all_awaited();
  tensors->begin();
  return {.has = [tensors](const Storage& storage) { return tensors->has(storage); },
          .require_unchanged = [tensors] { tensors->require_unchanged(); },
          .is_awaited = is_awaited};
}

}  // namespace tessera::detail
