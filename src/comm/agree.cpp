#include "comm/confer.h"
#include "tessera/comm.h"

namespace tessera {

void agree(Group& group, const std::string& operation, const std::function<void()>& work) {
  const auto contribute = [&work]() -> Bytes {
    work();
    return {};
  };
  (void)confer(group, operation, {contribute, combine_nothing, [](Bytes all) { return all; }});
}

}  // namespace tessera
