#include "checkpoint/save/key_errors.h"

#include "value/render.h"

namespace tessera {
namespace {

constexpr std::size_t kTold = 100;
constexpr std::size_t kLongestKey = 200;  // bytes

}  // namespace

void KeyErrors::add(const Error& error) {
  ++count_;
  if (told_.size() < kTold) told_.push_back(error);
  one_code_ = one_code_ && error.code() == told_.front().code();
}

void KeyErrors::require_none() const {
  if (count_ == 0) return;
  if (count_ == 1) throw Error(told_.front());
  std::string text = std::to_string(count_) + " keys do not fit: ";
  for (const Error& error : told_) {
    if (&error != &told_.front()) text += "; ";
    text += "'" + printable(error.key(), kLongestKey) + "': " + error.message();
  }
  if (count_ > told_.size()) text += "; and " + std::to_string(count_ - told_.size()) + " more";
  throw Error(one_code_ ? told_.front().code() : ErrorCode::mismatch, std::move(text))
      .at_key(told_.front().key());
}

}  // namespace tessera
