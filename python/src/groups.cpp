#include "groups.h"

#include <cstddef>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ending.h"
#include "tessera/error.h"
#include "text.h"

namespace tessera::python {
namespace {

nb::bytes message_of(const Bytes& bytes) {
  return nb::bytes(bytes.data(), bytes.size());
}

std::string type_of(nb::handle object) {
  return text_of(object.type().attr("__name__"));
}

Bytes bytes_of(nb::handle message) {
  if (!PyBytes_Check(message.ptr())) {
    throw Error(ErrorCode::invalid_argument, "`group` has brought a " + type_of(message) +
                                                 ", and not the bytes that a rank has sent");
  }
  const auto bytes = nb::borrow<nb::bytes>(message);
  const auto* const begin = static_cast<const std::byte*>(bytes.data());
  return {begin, begin + bytes.size()};
}

std::vector<Bytes> all_of(nb::handle messages, int ranks) {
  std::vector<Bytes> all;
  for (const nb::handle message : messages) all.push_back(bytes_of(message));
  if (all.size() != static_cast<std::size_t>(ranks)) {
    throw Error(ErrorCode::invalid_argument, "`group` has brought " + std::to_string(all.size()) +
                                                 " messages of " + std::to_string(ranks) +
                                                 " ranks");
  }
  return all;
}

class CarriedGroup final : public Group {
 public:
  CarriedGroup(nb::object carrier, std::shared_ptr<Errands> errands)
      : rank_(nb::cast<int>(carrier.attr("rank"))),
        size_(nb::cast<int>(carrier.attr("size"))),
        carrier_(shared(std::move(carrier))),
        errands_(std::move(errands)) {}
  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int size() const noexcept override { return size_; }
  void barrier() override { (void)all_gather({}); }

  std::vector<Bytes> gather(const Bytes& mine, int root) override {
    return asked([&] {
      const nb::object all = carrier_->attr("gather")(message_of(mine), root);
      return rank_ == root ? all_of(all, size_) : std::vector<Bytes>();
    });
  }
  std::vector<Bytes> all_gather(const Bytes& mine) override {
    return asked([&] { return all_of(carrier_->attr("all_gather")(message_of(mine)), size_); });
  }
  Bytes broadcast(const Bytes& message, int root) override {
    return asked([&] { return bytes_of(carrier_->attr("broadcast")(message_of(message), root)); });
  }
  Bytes scatter(const std::vector<Bytes>& messages, int root) override {
    return asked([&] {
      nb::list all;
      for (const Bytes& message : messages) all.append(message_of(message));
      return bytes_of(carrier_->attr("scatter")(all, root));
    });
  }

 private:
  // A group that has failed once is of no use: its ranks are no longer at the same call.
  template <typename Call>
  std::invoke_result_t<Call> asked(const Call& call) {
    if (failure_) throw Error(*failure_);
    std::invoke_result_t<Call> answer;
    const auto ask = [&] {
      try {
        answer = call();
        return;
      } catch (nb::python_error& error) {
        const std::string said = text_of(nb::str(error.value()));
        const std::string type = type_of(error.value());
        failure_.emplace(ErrorCode::peer_failed, said.empty() ? type : type + ": " + said);
      } catch (const Error& error) {
        failure_ = error;
      }
      throw Error(*failure_);
    };
    if (errands_) {
      errands_->run(ask);
    } else {
      with_lock(ask);
    }
    return answer;
  }

  int rank_;
  int size_;
  const std::shared_ptr<nb::object> carrier_;
  const std::shared_ptr<Errands> errands_;
  std::optional<Error> failure_;
};

}  // namespace

std::unique_ptr<Group> group_of(nb::handle carrier, std::shared_ptr<Errands> errands) {
  if (carrier.is_none()) return solo_group();
  return std::make_unique<CarriedGroup>(nb::borrow(carrier), std::move(errands));
}

}  // namespace tessera::python
