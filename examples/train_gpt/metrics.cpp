#include "metrics.h"

#include <cmath>
#include <cstdlib>
#include <iomanip>
#include <sstream>
#include <vector>

#include "tessera/error.h"

namespace {

constexpr std::string_view kHeader = "step,loss,val_loss,lr,grad_norm,tokens_per_second";

std::vector<std::string> rows_until(const std::string& path, std::int64_t done) {
  std::vector<std::string> rows;
  std::ifstream file(path);
  std::string line;
  if (done == 0 || !std::getline(file, line) || line != kHeader) return rows;
  while (std::getline(file, line) && !file.eof()) {  // a killed run may leave half a row
    if (std::strtoll(line.c_str(), nullptr, 10) <= done) rows.push_back(line);
  }
  return rows;
}

}  // namespace

std::string to_line(const StepRow& row) {
  std::ostringstream line;
  line << "step " << std::setw(5) << row.step << std::fixed << std::setprecision(4) << "  loss "
       << row.loss;
  if (row.val_loss) line << "  val " << *row.val_loss;
  line << std::scientific << std::setprecision(2) << "  lr " << row.lr << std::fixed
       << std::setprecision(0) << "  " << row.tokens_per_second << " tokens/s";
  return line.str();
}

Metrics::Metrics(std::string path, std::int64_t done) : path_(std::move(path)) {
  if (path_.empty()) return;
  const auto rows = rows_until(path_, done);
  file_.open(path_, std::ios::trunc);
  file_ << std::setprecision(9) << kHeader << '\n';
  for (const std::string& row : rows) file_ << row << '\n';
  file_.flush();
  if (!file_) throw tessera::Error(tessera::ErrorCode::io, "cannot write metrics").at_path(path_);
}

void Metrics::add(const StepRow& row) {
  if (path_.empty()) return;
  file_ << row.step << ',' << row.loss << ',';
  if (row.val_loss) file_ << *row.val_loss;
  file_ << ',' << row.lr << ',' << row.grad_norm << ',' << std::llround(row.tokens_per_second)
        << std::endl;
  if (!file_) throw tessera::Error(tessera::ErrorCode::io, "cannot write metrics").at_path(path_);
}
