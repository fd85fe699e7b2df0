// All ranks go through the wanted tensors in the same order, and through each in row-major order,
// so nothing has to be said of what a batch holds. While rank 0 reads a batch, nobody else works;
// what a rank does with one is its contribution to the next conference. Where each rank reads its
// own files, that has also what they hold of the batch, and rank 0 puts these parts together.
#include "checkpoint/load/tell.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>

#include "base/digest.h"
#include "checkpoint/read/cast.h"
#include "checkpoint/read/missing.h"
#include "comm/confer.h"
#include "comm/message.h"
#include "layout/boxes.h"
#include "layout/plan.h"
#include "layout/strided.h"
#include "tessera/error.h"
#include "value/storage_reader.h"

namespace tessera {
namespace {

constexpr const char* kTelling = "reading a checkpoint for all ranks";

// Elements [begin, begin + count) of a leaf's tensor.
struct Segment {
  std::size_t leaf = 0;
  std::int64_t begin = 0;
  std::int64_t count = 0;
};

// The wanted elements, a batch after another.
class Batches {
 public:
  explicit Batches(const TellJob& job) : job_(job) {}

  // Empty: there are no more.
  std::vector<Segment> next() {
    std::vector<Segment> batch;
    std::size_t room = job_.batch;
    for (; leaf_ < job_.wanted.size(); ++leaf_, begin_ = 0) {
      const Value& value = job_.contents.leaves[leaf_].value;
      if (!job_.wanted[leaf_] || !value.is(Value::Kind::tensor)) continue;
      const std::int64_t left = numel(value.as_tensor().shape) - begin_;
      const std::size_t element = size_of(value.as_tensor().dtype);
      const std::int64_t count = std::min(left, static_cast<std::int64_t>(room / element));
      if (count == 0 && left > 0) return batch;
      if (count > 0) batch.push_back({leaf_, begin_, count});
      room -= static_cast<std::size_t>(count) * element;
      begin_ += count;
      if (count < left) return batch;
    }
    return batch;
  }

 private:
  const TellJob& job_;
  std::size_t leaf_ = 0;
  std::int64_t begin_ = 0;  // of its tensor
};

std::size_t size_of(const TellJob& job, const Segment& segment) {
  const DType dtype = job.contents.leaves[segment.leaf].value.as_tensor().dtype;
  return static_cast<std::size_t>(segment.count) * size_of(dtype);
}

// A batch from the parts that ranks have of it. Those that several ranks have are the same.
Bytes put_together(const TellJob& job, const std::vector<Segment>& batch, const Bytes& parts) {
  std::size_t size = 0;
  for (const Segment& segment : batch) size += size_of(job, segment);
  Bytes bytes(size);
  std::map<std::size_t, std::size_t> ends;  // by begin
  for (MessageReader message(parts); !message.at_end();) {
    const auto at = static_cast<std::size_t>(message.count());
    const std::span<const std::byte> part = message.block();
    std::ranges::copy(part, bytes.begin() + static_cast<std::ptrdiff_t>(at));
    std::size_t& end = ends[at];
    end = std::max(end, at + part.size());
  }
  std::size_t done = 0;
  for (const auto& [begin, end] : ends) {
    if (begin <= done) done = std::max(done, end);
  }
  for (const Segment& segment : batch) {
    const std::size_t own = size_of(job, segment);
    if (done < own) {
      throw Error(ErrorCode::incomplete, "no rank's own files hold a part of the tensor")
          .at_key(job.contents.leaves[segment.leaf].name);
    }
    done -= own;
  }
  return bytes;
}

// The part of who reads.
class TellingRank {
 public:
  explicit TellingRank(const TellJob& job) : job_(job) {}

  Bytes read(const std::vector<Segment>& batch) {
    Bytes bytes;
    for (const Segment& segment : batch) {
      const Tensor& tensor = reader_of(segment.leaf);
      const std::size_t at = bytes.size();
      bytes.resize(at + size_of(job_, segment));
      read_there(tensor, segment, {bytes.data() + at, size_of(job_, segment)});
    }
    if (batch.empty()) close();
    return bytes;
  }

  // What the own files hold of the batch, each part behind its place in the batch. Of tensors that
  // are whole in each rank's file rank 0 tells.
  Bytes read_own(const std::vector<Segment>& batch, int rank) {
    MessageWriter parts;
    std::size_t begin = 0;
    for (const Segment& segment : batch) {
      const Tensor& tensor = reader_of(segment.leaf);
      if (tensor.sharded || rank == 0) read_pieces(tensor, segment, begin, parts);
      begin += size_of(job_, segment);
    }
    if (batch.empty()) close();
    return parts.take();
  }

 private:
  // Calls `take` with what each piece that is there has of the segment, and the piece.
  template <class Take>
  static void for_each_part(const Tensor& tensor, const Segment& segment, const Take& take) {
    const Slice wanted[] = {FlatRange{segment.begin, segment.begin + segment.count}};
    for (const Piece& piece : tensor.pieces) {
      if (is_missing(piece)) continue;
      const Slice held[] = {piece.slice};
      for (const Copy& copy : plan_copies(tensor.shape, held, wanted)) take(piece, copy);
    }
  }

  // No rank takes elements that lie in missing files: all have planned their loads. They are zeros.
  void read_there(const Tensor& tensor, const Segment& segment, MutableByteView out) {
    if (std::ranges::none_of(tensor.pieces, is_missing))
      return reader_->read(whole(tensor.shape), segment.begin, segment.count, out.data());
    const std::size_t element = size_of(tensor.dtype);
    for_each_part(tensor, segment, [&](const Piece& piece, const Copy& copy) {
      reader_->read(piece.slice, copy.from_local, copy.count,
                    out.data() + static_cast<std::size_t>(copy.to_local) * element);
    });
  }

  void read_pieces(const Tensor& tensor, const Segment& segment, std::size_t begin,
                   MessageWriter& parts) {
    const std::size_t element = size_of(tensor.dtype);
    for_each_part(tensor, segment, [&](const Piece& piece, const Copy& copy) {
      Bytes bytes(static_cast<std::size_t>(copy.count) * element);
      reader_->read(piece.slice, copy.from_local, copy.count, bytes.data());
      parts.count(begin + static_cast<std::size_t>(copy.to_local) * element).block(bytes);
    });
  }

  const Tensor& reader_of(std::size_t leaf) {
    const std::string& name = job_.contents.leaves[leaf].name;
    const Tensor& tensor = job_.from->tensor(name);
    if (!reader_ || leaf_ != leaf) {
      close();
      reader_.emplace(tensor, name);
      leaf_ = leaf;
    }
    return tensor;
  }

  void close() {
    if (reader_ && job_.checks != nullptr) reader_->hand_over(*job_.checks);
    if (reader_) job_.counters.add(reader_->report());
    reader_.reset();
  }

  const TellJob& job_;
  std::size_t leaf_ = 0;  // whose tensor reader_ reads
  std::optional<TensorReader> reader_;
};

// A piece that takes its elements from what is told, in ascending order.
class PieceTaker {
 public:
  // `owner`: the key whose memory the piece is; empty: it is its own.
  PieceTaker(const Filling& filling, std::size_t piece, std::string owner)
      : filling_(filling),
        want_(filling.wanted.as_tensor()),
        have_(filling.found.as_tensor().dtype),
        piece_(want_.pieces[piece]),
        sizes_(array_of(piece_.slice)),
        strides_(piece_.strides.empty() ? contiguous_strides(sizes_) : piece_.strides),
        element_(size_of(want_.dtype)),
        owner_(std::move(owner)) {
    if (piece_.storage->device) writer_.emplace(piece_.storage->device);
  }

  // Returns the bytes that it took.
  std::uint64_t take(std::int64_t begin, std::int64_t count, const std::byte* elements) {
    const Slice from[] = {FlatRange{begin, begin + count}};
    const Slice to[] = {piece_.slice};
    std::uint64_t taken = 0;
    for (const Copy& copy : plan_copies(want_.shape, from, to)) {
      scratch_.resize(static_cast<std::size_t>(copy.count) * element_);
      convert(elements + static_cast<std::size_t>(copy.from_local) * size_of(have_), copy.count);
      if (owner_.empty()) {
        resolve_bits(piece_, want_.dtype, scratch_.data(), copy.count);
        store(copy.to_local, copy.count);
      } else {
        told_.add(scratch_);
      }
      taken += scratch_.size();
    }
    return taken;
  }

  // After all pieces have taken everything.
  void finish() {
    if (writer_) writer_->finish();
    if (!owner_.empty()) compare();
  }

 private:
  void convert(const std::byte* elements, std::int64_t count) {
    if (want_.dtype == have_) {
      std::memcpy(scratch_.data(), elements, scratch_.size());
    } else {
      cast(have_, elements, want_.dtype, scratch_.data(), count);
    }
  }

  // The scratch becomes elements of the piece from number `begin` on.
  void store(std::int64_t begin, std::int64_t count) {
    const std::byte* from = scratch_.data();
    for_each_strided_run(sizes_, strides_, begin, count, [&](std::int64_t at, std::int64_t run) {
      const std::size_t bytes = static_cast<std::size_t>(run) * element_;
      const std::size_t place = static_cast<std::size_t>(piece_.storage_offset + at) * element_;
      if (writer_) {
        const WriteRange range{place, {from, bytes}};
        writer_->write_ranges({&range, 1});
      } else {
        std::memcpy(piece_.storage->data + place, from, bytes);
      }
      from += bytes;
    });
  }

  void compare() {
    Tensor held = want_;
    held.pieces = {piece_};
    if (digest_of_slice(held, filling_.key, piece_.slice) != told_.value())
      throw other_values(filling_.key, owner_);
  }

  const Filling& filling_;
  const Tensor& want_;
  DType have_;
  const Piece& piece_;
  Shape sizes_;
  Shape strides_;
  std::size_t element_;
  std::string owner_;
  RunningDigest told_;  // of the elements, for a piece that is compared
  std::optional<DeviceWriter> writer_;
  std::vector<std::byte> scratch_;
};

// This rank's pieces, by the leaf that they take from.
class Takers {
 public:
  explicit Takers(const TellJob& job) : job_(job) {
    std::unordered_map<const void*, std::size_t> leaves;
    for (std::size_t i = 0; i < job.contents.leaves.size(); ++i)
      leaves.emplace(job.contents.leaves[i].value.identity(), i);
    for (std::size_t i = 0; i < job.fillings.size(); ++i) {
      const Filling& filling = job.fillings[i];
      auto& takers = takers_[leaves.at(filling.found.identity())];
      const auto& pieces = filling.wanted.as_tensor().pieces;
      for (std::size_t p = 0; p < pieces.size(); ++p) {
        if (numel(pieces[p].slice) == 0) continue;
        const PieceOf& owner = job.owners[i][p];
        const bool own = owner == PieceOf{i, p};
        takers.push_back(std::make_unique<PieceTaker>(
            filling, p, own ? std::string() : job.fillings[owner.filling].key));
      }
    }
  }

  void take(const std::vector<Segment>& batch, const Bytes& bytes) {
    const std::byte* at = bytes.data();
    for (const Segment& segment : batch) {
      const auto found = takers_.find(segment.leaf);
      if (found != takers_.end()) {
        for (const auto& taker : found->second)
          job_.meter.add(taker->take(segment.begin, segment.count, at));
      }
      at += size_of(job_, segment);
    }
    job_.meter.add(0);  // whoever takes nothing may be asked to stop, too
  }

  void finish() {
    for (const auto& [leaf, takers] : takers_) {
      for (const auto& taker : takers) taker->finish();
    }
  }

 private:
  const TellJob& job_;
  std::map<std::size_t, std::vector<std::unique_ptr<PieceTaker>>> takers_;
};

}  // namespace

void tell_all(const TellJob& job, Group& group) {
  std::optional<Takers> takers;
  Batches batches(job);
  TellingRank teller(job);
  const bool by_all = job.checks != nullptr;
  std::vector<Segment> told;
  Bytes bytes;
  for (bool more = true; more;) {
    const std::vector<Segment> next = batches.next();
    more = !next.empty();
    const auto contribute = [&] {
      if (!takers) takers.emplace(job);
      takers->take(told, bytes);
      if (!more) takers->finish();
      return by_all ? teller.read_own(next, group.rank()) : Bytes();
    };
    const auto conclude = [&](const Bytes& parts) {
      return by_all ? put_together(job, next, parts) : teller.read(next);
    };
    bytes =
        confer(group, kTelling,
               {contribute, by_all ? Combine(side_by_side) : Combine(combine_nothing), conclude});
    told = next;
  }
}

}  // namespace tessera
