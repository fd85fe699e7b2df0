#include <algorithm>
#include <bit>
#include <cstring>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "base/process.h"
#include "same_host/same_host.h"

namespace tessera::same_host {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Every text on the board begins with one of these.
constexpr const char* kYes = "yes ";
constexpr const char* kNo = "no ";

std::string key_of(const char* what, int rank) {
  return std::string(what) + "/" + std::to_string(rank);
}

// Gives `work`'s text, or the reason why this rank cannot go on. Peers that died are not a reason.
template <typename Work>
std::string answer(Work&& work) {
  try {
    return kYes + work();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::peer_failed) throw;
    return kNo + error.message();
  }
}

Error ended(int rank) {
  return {ErrorCode::peer_failed, "the process of rank " + std::to_string(rank) + " has ended"};
}

class Meeter {
 public:
  Meeter(Board& board, int rank, int size, const MeetOptions& options)
      : board_(board),
        rank_(rank),
        size_(size),
        options_(options),
        end_(steady_clock::now() + options.deadline) {}

  Meeting run() {
    introduce();
    if (!refusal_.empty()) return {nullptr, refusal_};
    map();
    if (!refusal_.empty()) return {nullptr, refusal_};
    // All have mapped it: with the descriptor goes the last way in.
    segment_->close_descriptor();
    return {
        std::make_unique<Exchange>(std::move(*segment_), rank_, options_.ring, std::move(watches_)),
        ""};
  }

 private:
  // Learns who the ranks are, and whether all want to and are on one host.
  void introduce() {
    board_.post(key_of("process", rank_), options_.wanted
                                              ? answer([] { return to_text(this_process()); })
                                              : kNo + std::string("switched off"));
    const auto texts = collect("process");
    if (!refusal_.empty()) return;
    for (const auto& text : texts) processes_.push_back(process_from_text(text));
    for (int r = 1; r < size_; ++r) {
      if (processes_[static_cast<std::size_t>(r)].host != processes_[0].host)
        refusal_ = "rank " + std::to_string(r) + " is not on the host of rank 0";
    }
  }

  // Rank 0 makes the memory and says where; everybody maps it and says so.
  void map() {
    const auto bytes = segment_bytes(size_, options_.ring);
    auto mine = answer([&] {
      for (const auto& process : processes_) watches_.emplace_back(process);
      return std::string();
    });
    if (rank_ == 0) board_.post("segment", answer([&] { return make_segment(bytes); }));
    const auto announced = wait_for_text("segment", 0);
    if (announced.starts_with(kNo)) {
      mine = announced;
    } else if (!mine.starts_with(kNo)) {
      mine = answer([&] { return attach(announced, bytes); });
    }
    board_.post(key_of("mapped", rank_), mine);
    collect("mapped");
  }

  std::string make_segment(std::size_t bytes) {
    segment_.emplace(Segment::create(bytes));
    const auto secret = random_uuid();
    std::memcpy(segment_->data(), secret.data(), std::min(secret.size(), kSecretBytes));
    return std::to_string(segment_->descriptor()) + " " + secret;
  }

  std::string attach(const std::string& announced, std::size_t bytes) {
    if (rank_ == 0) return "";
    std::istringstream words(announced);
    std::string yes, secret;
    int descriptor = -1;
    words >> yes >> descriptor >> secret;
    try {
      segment_.emplace(Segment::attach(processes_[0].pid, descriptor, bytes));
    } catch (const Error&) {
      if (!watches_[0].alive()) throw ended(0);  // which is why it could not be reached
      throw;
    }
    if (secret.empty() || secret.size() > kSecretBytes ||
        std::memcmp(segment_->data(), secret.data(), secret.size()) != 0) {
      throw Error(ErrorCode::unsupported, "found other shared memory than rank 0 announced");
    }
    return "";
  }

  // The texts of all ranks behind their "yes"; the first "no" becomes the refusal.
  std::vector<std::string> collect(const char* what) {
    std::vector<std::string> texts;
    for (int r = 0; r < size_; ++r) {
      const auto text = wait_for_text(key_of(what, r), r);
      const auto space = text.find(' ') + 1;
      if (text.starts_with(kNo) && refusal_.empty())
        refusal_ = "rank " + std::to_string(r) + ": " + text.substr(space);
      texts.push_back(text.substr(space));
    }
    return texts;
  }

  std::string wait_for_text(const std::string& key, int author) {
    for (milliseconds nap{0};; nap = std::min(nap + milliseconds(1), milliseconds(20))) {
      // Looked at before the board: what the author posted before it ended counts.
      const auto at = static_cast<std::size_t>(author);
      const bool runs = at >= watches_.size() || watches_[at].alive();
      if (auto text = board_.read(key)) return *std::move(text);
      if (!runs) throw ended(author);
      if (steady_clock::now() >= end_) {
        throw Error(ErrorCode::timeout,
                    "timed out after " + std::to_string(options_.deadline.count()) + " ms: rank " +
                        std::to_string(author) + " did not come");
      }
      std::this_thread::sleep_for(nap);
    }
  }

  Board& board_;
  const int rank_;
  const int size_;
  const MeetOptions options_;
  const steady_clock::time_point end_;
  std::vector<ProcessId> processes_;
  std::vector<Watch> watches_;
  std::optional<Segment> segment_;
  std::string refusal_;  // empty: none so far; the same on all ranks
};

}  // namespace

Meeting meet(Board& board, int rank, int size, const MeetOptions& options) {
  if (!std::has_single_bit(options.ring.slots) || options.ring.slot_bytes == 0 ||
      options.ring.slot_bytes % 64 != 0) {
    throw Error(ErrorCode::invalid_argument,
                "a ring has a power of two of slots, each a multiple of 64 bytes");
  }
  return Meeter(board, rank, size, options).run();
}

}  // namespace tessera::same_host
