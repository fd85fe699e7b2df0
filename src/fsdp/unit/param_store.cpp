#include "fsdp/unit/param_store.h"

#include <algorithm>
#include <utility>

#include <c10/core/StreamGuard.h>
#include <torch/torch.h>

#include "fsdp/unit/whole_copies.h"
#include "layout/boxes.h"
#include "torch/c10_error.h"
#include "torch/compat.h"
#include "torch/device.h"

namespace tessera::detail {
namespace {

const SideStream& stream_of(std::optional<SideStream>& stream, at::Device device) {
  if (!stream || stream->stream().device() != device) stream.emplace(device);
  return *stream;
}

}  // namespace

at::Tensor StoragePool::make_like(const at::Tensor& array) {
  if (array.is_meta()) return at::empty_like(array);  // a shape, without memory
  auto& model = *array.storage().unsafeGetStorageImpl();
  const auto bytes = model.nbytes();
  auto memory = reuse(model);
  if (!memory) {
    memory = model.allocator()->allocate(bytes);
    // The allocator has it from kernels that the current stream has yet to run.
    follow_current();
  }
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory), model.allocator(),
                       /*resizable=*/false);
  return at::empty({0}, array.options()).set_(std::move(storage), 0, array.sizes(), {});
}

c10::DataPtr StoragePool::reuse(const c10::StorageImpl& model) {
  const auto block = std::ranges::find_if(blocks_, [&](const auto& one) {
    return one.bytes == model.nbytes() && one.memory.device() == model.device();
  });
  if (block == blocks_.end()) return {};
  if (block->last_use && gathers_) block->last_use->block(gathers_->stream());
  auto memory = std::move(block->memory);
  blocks_.erase(block);
  return memory;
}

void StoragePool::take(c10::StorageImpl& storage) {
  const auto bytes = storage.nbytes();
  auto memory = storage.set_data_ptr(c10::DataPtr(nullptr, storage.device()));
  const auto device = memory.device();
  if (!memory || device.is_meta() || blocks_.size() >= kKept) return;
  Block block{bytes, std::move(memory), std::nullopt};
  if (!device.is_cpu()) block.last_use = mark_current(device);
  blocks_.push_back(std::move(block));
}

const SideStream& StoragePool::gathers(at::Device device) {
  return stream_of(gathers_, device);
}

const SideStream& StoragePool::sums(at::Device device) {
  return stream_of(sums_, device);
}

void StoragePool::follow_current() {
  if (gathers_) gathers_->follow_current();
}

namespace {

c10::StorageImpl& storage_of(const at::Tensor& tensor) {
  return *tensor.storage().unsafeGetStorageImpl();
}

}  // namespace

ParamStore::ParamStore(UnitLayout layout, const ParamStoreOptions& options,
                       const std::vector<at::Tensor>& parameters)
    : layout_(std::move(layout)), rank_(options.rank) {
  const auto own = parameters.front().options().requires_grad(false);
  const auto travelling = own.device(options.device).dtype(options.compute);
  // Real devices copy from pinned memory.
  const bool pins = options.shard_device.is_cpu() && is_accelerator(options.device);
  channel_ = options.transport->open(
      layout_.shard_elements, own.device(options.shard_device).pinned_memory(pins), travelling);
  gathered_ = at::empty({layout_.gathered_elements}, travelling);
  fill_shard(parameters);
}

// The memory of a gather under way goes back to the stream that computes, which knows nothing of
// it.
ParamStore::~ParamStore() {
  if (!arrival_) return;
  finish_unwanted([&] { make_current_wait(*arrival_, gathered_.device()); });
}

void ParamStore::take_over(const std::vector<at::Tensor>& parameters) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    replace_data(parameters[i], full(i));
    parameters[i].mutable_grad() = at::Tensor();
  }
  StoragePool().take(storage_of(gathered_));
}

void ParamStore::fill_shard(const std::vector<at::Tensor>& parameters) {
  for (const auto& run : layout_.runs[rank_]) {
    const auto whole = parameters[run.param].detach().contiguous().view({-1});
    copy_quietly(shard(), run.local, whole.to(shard().device()), run.global, run.count);
  }
  for (const auto& padding : layout_.padding[rank_])
    shard().narrow(0, padding.begin, numel(padding)).fill_(kPaddingValue);
}

void ParamStore::set_label(const std::string& label) {
  channel_->set_label(label);
  if (parking_) parking_->channel->set_label(label + ", among fewer ranks");
}

void ParamStore::wrap_channel(const ChannelWrapper& wrap) {
  channel_ = wrap(std::move(channel_), static_cast<int>(layout_.runs.size()), gathered_.options());
}

at::Tensor ParamStore::local(std::size_t param) const {
  const auto& part = layout_.parts[rank_][param];
  return shard().narrow(0, part.base, numel(part.slice)).view(array_of(part.slice)).detach();
}

at::Tensor ParamStore::full(std::size_t param) const {
  const auto& place = layout_.params[param];
  return gathered_.narrow(0, place.gathered_offset, place.elements).view(place.shape);
}

bool ParamStore::owns(const at::Tensor& full) const {
  return full.has_storage() && &storage_of(full) == &storage_of(gathered_);
}

void ParamStore::open_parking(UnitLayout layout, int rank, Transport& transport) {
  const auto options = gathered_.options();
  auto channel = transport.open(layout.shard_elements, options, options);
  parking_ = Parking{std::move(layout), rank, std::move(channel)};
}

Channel& ParamStore::source() const {
  return is_parked_ ? *parking_->channel : *channel_;
}

const UnitLayout& ParamStore::source_layout() const {
  return is_parked_ ? parking_->layout : layout_;
}

void ParamStore::start_gather(std::shared_ptr<StoragePool> pool, bool may_change) {
  const auto& from = source_layout();
  filling_ = at::Tensor();  // of a gather that failed
  if (source().moves_whole()) return start_whole_gather(*pool, may_change);
  const auto memory = [this, pool] { return filling_ = pool->make_like(gathered_); };
  if (from.is_end_to_end && source().start_gather_into(memory, may_change)) return;
  source().start_gather(
      [this, &from, pool = std::move(pool)](int rank, std::int64_t begin, const at::Tensor& part) {
        // Taken when the first part is here: until then a prefetched unit costs its buffers only.
        if (!filling_.defined()) filling_ = pool->make_like(gathered_);
        take(from, rank, begin, part);
      },
      may_change);
}

// All of it is queued at once, on the stream of gathers. What travels fills the parameters' own
// memory if shards lie as parameters do.
void ParamStore::start_whole_gather(StoragePool& pool, bool may_change) {
  const torch::NoGradGuard no_grad;
  const auto& gathers = pool.gathers(gathered_.device());
  // The schedule's own gathers come after the changes that the beginning of the pass has seen.
  if (may_change) gathers.follow_current();
  filling_ = pool.make_like(gathered_);
  if (is_parked_) parked_->block(gathers.stream());
  const c10::StreamGuard guard(gathers.stream());
  const auto& from = source_layout();
  const auto count = static_cast<std::int64_t>(from.runs.size()) * from.shard_elements;
  const auto all = from.is_end_to_end ? filling_ : at::empty({count}, gathered_.options());
  static_cast<void>(source().start_gather_into([&] { return all; }, may_change));
  source().finish_gather();
  if (!from.is_end_to_end) copy_out(from, all, layout_, filling_);
  arrival_ = gathers.mark();
}

// The host goes on; the stream that computes waits.
void ParamStore::await_gather() {
  if (!arrival_) return source().finish_gather();
  make_current_wait(*std::exchange(arrival_, std::nullopt), gathered_.device());
}

void ParamStore::take(const UnitLayout& from, int rank, std::int64_t begin,
                      const at::Tensor& part) {
  if (from.is_end_to_end)
    return copy_quietly(filling_, rank * from.shard_elements + begin, part, 0, part.numel());
  const auto end = begin + part.numel();
  const auto& runs = from.runs[rank];
  for (auto run = first_run(runs, begin); run != runs.end() && run->local < end; ++run) {
    const auto first = std::max(begin, run->local);
    const auto last = std::min(end, run->local + run->count);
    copy_quietly(filling_,
                 layout_.params[run->param].gathered_offset + run->global + first - run->local,
                 part, first - begin, last - first);
  }
}

// The memory moves under the module's tensors. After a failure a peer may still write to it.
void ParamStore::finish_gather() {
  try {
    await_gather();
  } catch (...) {
    filling_ = at::Tensor();
    throw;
  }
  auto& storage = storage_of(gathered_);
  compat::allow_access(storage);
  storage.set_data_ptr_noswap(
      storage_of(filling_).set_data_ptr(c10::DataPtr(nullptr, storage.device())));
  filling_ = at::Tensor();
}

void ParamStore::drop_gather(StoragePool& pool) {
  bool is_done = false;
  finish_unwanted([&] {
    await_gather();
    is_done = true;
  });
  if (is_done && filling_.defined()) pool.take(storage_of(filling_));
  filling_ = at::Tensor();
}

void ParamStore::free(StoragePool& pool) {
  pool.take(storage_of(gathered_));
}

void ParamStore::park(StoragePool& pool) {
  const auto& [parts, rank, channel] = *parking_;
  if (channel->moves_whole()) {
    copy_part(layout_, gathered_, parts, rank, channel->shard());
    parked_ = mark_current(device());
  } else {
    for (const auto& run : parts.runs[rank]) {
      copy_quietly(channel->shard(), run.local, gathered_,
                   layout_.params[run.param].gathered_offset + run.global, run.count);
    }
  }
  is_parked_ = true;
  free(pool);
}

void ParamStore::forbid_access(const std::string& text) {
  compat::forbid_access(storage_of(gathered_), text);
}

bool ParamStore::has_memory() const {
  return storage_of(gathered_)._mutable_data_ptr_no_checks().get() != nullptr;
}

std::uint64_t ParamStore::gathered_bytes() const {
  return has_memory() ? whole_bytes() : 0;
}

std::uint64_t ParamStore::whole_bytes() const {
  return gathered_.storage().nbytes();
}

}  // namespace tessera::detail
