#include "reports.h"

namespace tessera::python {

namespace nb = nanobind;

nb::dict dict_of(const IoReport& report) {
  nb::dict dict;
  dict["bytes_needed"] = report.bytes_needed;
  dict["bytes_read"] = report.bytes_read;
  dict["bytes_unchecked"] = report.bytes_unchecked;
  dict["bytes_written"] = report.bytes_written;
  dict["requests"] = report.requests;
  dict["retries"] = report.retries;
  dict["bytes_again"] = report.bytes_again;
  return dict;
}

nb::dict dict_of(const SaveResult& result) {
  nb::dict dict = dict_of(static_cast<const IoReport&>(result));
  dict["files"] = result.files;
  dict["total_bytes"] = result.total_bytes;
  dict["values_in_metadata"] = result.values_in_metadata;
  return dict;
}

}  // namespace tessera::python
