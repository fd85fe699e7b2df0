#include "tessera/detail/call.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <utility>

#include "fsdp/step/root.h"
#include "tessera/error.h"

namespace tessera::detail {

void throw_unknown_result(const Unit& unit, const std::type_info& result) {
  throw Error(ErrorCode::invalid_argument,
              "unit '" + unit.name() + "' returns " + c10::demangle(result.name()) +
                  ", in which tensors cannot be found: specialize tessera::TensorsOf for it");
}

void throw_changed_argument(const Unit& unit) {
  throw Error(ErrorCode::unsupported,
              "the call of unit '" + unit.name() +
                  "' has changed an argument, and its parameters are not known: give the function "
                  "that is called types for them, instead of auto or overloads");
}

void require_module(const torch::nn::Module* module) {
  if (module == nullptr) throw Error(ErrorCode::invalid_argument, "a null pointer for a module");
}

Call::Call(std::shared_ptr<Unit> unit) : unit_(std::move(unit)) {
  if (!entry_of(*unit_).root) Root::make(*unit_);
  depth_ = entry_of(*unit_).root->depth();
}

Call::~Call() {
  if (!left_) entry_of(*unit_).root->fail(depth_);
}

void Call::enter(const std::vector<at::Tensor*>& inputs) {
  entry_of(*unit_).root->enter(*unit_, inputs);
}

void Call::leave(const std::vector<at::Tensor*>& results) {
  entry_of(*unit_).root->leave(*unit_, results);
  left_ = true;
}

void Call::explain(std::exception_ptr failure) const {
  try {
    std::rethrow_exception(failure);
  } catch (const c10::Error& e) {
    // libtorch throws the text that a storage without memory was marked with.
    const std::string text = e.what_without_backtrace();
    const auto ours = text.find("tessera: ");
    if (ours == std::string::npos) throw;
    throw Error(ErrorCode::invalid_argument,
                text.substr(ours + 9, text.find('\n', ours) - ours - 9));
  }
}

}  // namespace tessera::detail
