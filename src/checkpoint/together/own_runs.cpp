#include "checkpoint/together/own_runs.h"

#include <algorithm>

#include "base/crc32.h"
#include "layout/plan.h"

namespace tessera {
namespace {

constexpr std::size_t kWindow = 1 << 20;  // bytes: stays in the cache between checksum and write

// The runs of one box.
class BoxRuns {
 public:
  BoxRuns(const Tensor& tensor, TensorReader& reader, const Box& box, const RunTarget& target)
      : reader_(reader), box_(box), target_(target), element_(size_of(tensor.dtype)) {}

  void write(const Copy& copy, std::vector<std::byte>& window, Meter* meter) {
    const auto step = static_cast<std::int64_t>(window.size() / element_);
    for (std::int64_t done = 0; done < copy.count; done += step) {
      const std::int64_t count = std::min(step, copy.count - done);
      const auto bytes = MutableByteView(window).first(static_cast<std::size_t>(count) * element_);
      reader_.read(box_, copy.from_local + done, count, bytes.data());
      const std::uint64_t at =
          target_.begin + static_cast<std::uint64_t>(copy.to_local + done) * element_;
      if (target_.sink != nullptr) target_.sink->write_at(target_.offset + at, bytes);
      sum_.add(
          {bytes.size(), crc32_term(crc32(bytes), bytes.size(), target_.size - at - bytes.size())});
      if (meter != nullptr) meter->add(bytes.size());
    }
  }

  [[nodiscard]] const WrittenSum& sum() const { return sum_; }

 private:
  TensorReader& reader_;
  const Slice box_;
  const RunTarget& target_;
  const std::size_t element_;
  WrittenSum sum_;
};

}  // namespace

WrittenSum write_runs(const Tensor& tensor, TensorReader& reader, const std::vector<Box>& boxes,
                      const Slice& slice, const RunTarget& target, Meter* meter) {
  WrittenSum sum;
  const std::uint64_t most = static_cast<std::uint64_t>(numel(slice)) * size_of(tensor.dtype);
  std::vector<std::byte> window;
  for (const Box& box : boxes) {
    const Slice from[] = {box};
    const Slice to[] = {slice};
    const std::vector<Copy> copies = plan_copies(tensor.shape, from, to);
    if (copies.empty()) continue;
    if (window.empty()) window.resize(std::clamp<std::uint64_t>(most, 16, kWindow));
    BoxRuns runs(tensor, reader, box, target);
    for (const Copy& copy : copies) runs.write(copy, window, meter);
    sum.add(runs.sum());
  }
  return sum;
}

}  // namespace tessera
