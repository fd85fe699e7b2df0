#include "comm/whereabouts.h"

#include <mutex>
#include <utility>

namespace tessera {

class Place {
 public:
  void set(std::string text) {
    const std::lock_guard lock(mutex_);
    text_ = std::move(text);
  }
  [[nodiscard]] std::string text() const {
    const std::lock_guard lock(mutex_);
    return text_;
  }

 private:
  mutable std::mutex mutex_;
  std::string text_;
};

namespace {

constexpr char kBetween = '\n';

std::shared_ptr<Place>& place() {
  thread_local auto place = std::make_shared<Place>();
  return place;
}

// " for a barrier in saving a checkpoint"
constexpr std::string_view kFor = " for ", kIn = " in ";
std::string& purpose_of_thread() {
  thread_local std::string text;
  return text;
}

}  // namespace

Purpose::Purpose(std::string_view text) : around_(purpose_of_thread()) {
  std::string all(kFor);
  all += text;
  if (!around_.empty()) {
    all += kIn;
    all += std::string_view(around_).substr(kFor.size());
  }
  purpose_of_thread() = std::move(all);
}

Purpose::~Purpose() {
  purpose_of_thread() = std::move(around_);
}

std::string with_purpose(std::string_view name) {
  return std::string(name) + purpose_of_thread();
}

void set_whereabouts(std::string text) {
  place()->set(std::move(text));
}

std::string whereabouts() {
  return place()->text();
}

std::shared_ptr<Place> place_of_thread() {
  return place();
}

void share_place(std::shared_ptr<Place> shared) {
  place() = std::move(shared);
}

std::string called_here(std::string_view name) {
  auto called = with_purpose(name).substr(0, kComparedBytes);
  if (const auto where = whereabouts(); !where.empty()) called += kBetween + where;
  return called.substr(0, kCalledBytes);
}

std::string_view compared_part(std::string_view called) {
  return called.substr(0, called.find(kBetween));
}

std::string to_sentence(std::string_view called) {
  const auto name = compared_part(called);
  if (name.size() == called.size()) return std::string(name);
  return std::string(name) + " (" + std::string(called.substr(name.size() + 1)) + ")";
}

Error different_calls(int rank, std::string_view called, int peer, std::string_view peer_called) {
  auto text = "rank " + std::to_string(rank) + " called " + to_sentence(called) + ", rank " +
              std::to_string(peer) + " called " + to_sentence(peer_called);
  const auto is_plain = [](std::string_view one) { return compared_part(one) == one; };
  if (!is_plain(called) || !is_plain(peer_called)) {
    text +=
        ": not every rank did the same forwards, backwards and steps; look for a step that one "
        "rank "
        "leaves out (a `continue` where the loss is NaN, data that ends earlier) and for modules "
        "that one rank does not call (an expert without tokens)";
  }
  return {ErrorCode::mismatch, std::move(text)};
}

}  // namespace tessera
