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

}  // namespace tessera::python
