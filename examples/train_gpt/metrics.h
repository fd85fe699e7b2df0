// The CSV of a training: one row a step, numbers in full precision so that runs can be compared.
#pragma once

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>

struct StepRow {
  std::int64_t step = 0;           // counted from 1
  double loss = 0;                 // mean over the global batch, before the step
  std::optional<double> val_loss;  // after the step
  double lr = 0;
  double grad_norm = 0;  // before clipping
  double tokens_per_second = 0;
};

// For a person to read.
[[nodiscard]] std::string to_line(const StepRow& row);

class Metrics {
 public:
  // An empty path writes nothing. A run that resumes after `done` steps keeps the rows up to there
  // and replaces what an interrupted run wrote beyond.
  Metrics(std::string path, std::int64_t done);
  void add(const StepRow& row);

 private:
  std::string path_;
  std::ofstream file_;
};
