#include "storage/s3/xml.h"

#include "target.h"
#include "tessera/error.h"

// The answer is refused if each of its readers refuses it.
void tessera::fuzz::parse(ByteView input) {
  const std::string_view xml(reinterpret_cast<const char*>(input.data()), input.size());
  bool is_good = !s3::parse_error(xml).code.empty();
  const auto read = [&](auto parser) {
    try {
      (void)parser(xml);
      is_good = true;
    } catch (const Error&) {  // it is of another kind, or wrong
    }
  };
  read(s3::parse_listing);
  read(s3::parse_uploads);
  read(s3::parse_parts);
  read(s3::parse_upload_id);
  read(s3::parse_copied_etag);
  if (!is_good) throw Error(ErrorCode::corrupt, "no reader takes it");
}
