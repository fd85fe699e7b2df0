#include "storage/hub/hub_answers.h"

#include <string>

#include "target.h"
#include "tessera/error.h"

// The answer is refused if each of its readers refuses it.
void tessera::fuzz::parse(ByteView input) {
  const std::string_view text(reinterpret_cast<const char*>(input.data()), input.size());
  bool is_good = false;
  const auto read = [&](auto parser) {
    try {
      (void)parser(text);
      is_good = true;
    } catch (const Error&) {  // it is of another kind, or wrong
    }
  };
  read(hub::entries_in);
  read(hub::commit_in);
  read(hub::next_query);
  if (!is_good) throw Error(ErrorCode::corrupt, "no reader takes it");
}
