// tessera verify: structure, coverage and every checksum there is.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "checkpoint/open/kinds.h"
#include "checkpoint/open/open.h"
#include "cli/commands.h"
#include "cli/json_value.h"
#include "cli/output.h"
#include "tessera/error.h"
#include "tessera/verify.h"
#include "value/render.h"

namespace tessera::cli {
namespace {

struct VerifyArguments {
  std::string path;
  std::vector<std::string> only;
  int threads = 2;
  OpenOptions open;
};

VerifyReport verify_part(const VerifyArguments& options, const ProgressHook& progress) {
  const VerifyOptions how{.open = options.open, .threads = options.threads, .progress = progress};
  const bool is_plain = !options.open.part && !options.open.raw;
  if (options.only.empty() && is_plain) return tessera::verify(options.path, how);
  Checkpoint checkpoint = open_as_pickled(options.path, options.open);
  require_used(options.open, checkpoint);
  keep_only(checkpoint, options.only);
  return tessera::verify(checkpoint, how);
}

void print_document(const VerifyReport& report) {
  nlohmann::ordered_json json;
  json["ok"] = report.findings.empty();
  json["tensors"] = report.tensors;
  json["inner_tensors"] = report.inner_tensors;
  json["bytes_checked"] = report.bytes;
  json["bytes_without_checksum"] = report.bytes_unchecked;
  auto& files = json["files"] = nlohmann::ordered_json::array();
  for (const CheckedBytes& checked : report.files) {
    files.push_back(
        {{"file", checked.file}, {"checked_by", to_string(checked.by)}, {"bytes", checked.bytes}});
  }
  json["findings"] = json_of_findings(report.findings);
  print_json(json);
}

// What the bytes were compared with: " by digests of blocks", and how many where there are several
// means. Empty: nothing was.
std::string means_of(const VerifyReport& report) {
  constexpr std::pair<CheckedBy, const char*> kMeans[] = {
      {CheckedBy::digests, "digests of blocks"},
      {CheckedBy::crc32, "the CRC-32s in the archive"},
      {CheckedBy::sha256, "the SHA-256 that the Hub names the file by"},
      {CheckedBy::git_sha1, "the digest of git that the Hub names the file by"}};
  std::string text;
  for (const auto& [by, means] : kMeans) {
    std::uint64_t bytes = 0;
    for (const CheckedBytes& checked : report.files) bytes += checked.by == by ? checked.bytes : 0;
    if (bytes == 0) continue;
    text += text.empty() ? (bytes < report.bytes ? ": " : "") : ", ";
    if (bytes < report.bytes) text += human_bytes(bytes);
    text += std::string(" by ") + means;
  }
  return text;
}

void print_lines(const VerifyReport& report) {
  for (const Finding& finding : report.findings) complain(finding.text);
  if (!report.findings.empty()) return;
  fmt::print("ok: {}{}, {} checked{}", counted(report.tensors, "tensor"),
             and_inner(report.inner_tensors), human_bytes(report.bytes), means_of(report));
  if (report.bytes_unchecked > 0) {
    fmt::print(", {} without a checksum in the file", human_bytes(report.bytes_unchecked));
  }
  fmt::print("\n");
}

int verify(const VerifyArguments& options, const Common& common) {
  VerifyReport report;
  {
    ProgressBar bar("verify", common);
    report = verify_part(options, bar.hook());
  }
  const Error* const obstacle = report.obstacle();
  if (obstacle != nullptr && report.findings.size() == 1) {
    if (obstacle->code() == ErrorCode::not_found) refuse_run(options.path, *obstacle);
    throw Error(*obstacle);
  }
  common.json ? print_document(report) : print_lines(report);
  if (obstacle != nullptr) return kFailed;
  return report.findings.empty() ? kDone : kNo;
}

constexpr const char* kVerifyExamples = R"(
Checks the structure, that every tensor is covered exactly once, and every checksum there is: the
digests of what tessera wrote or sealed, the CRC-32s of torch.save archives, and the SHA-256s by
which the Hugging Face Hub names what it has, what is in its cache, and what was downloaded into a
directory with its records. It says by which of these how much was checked. If there is a
tessera-state.json, the tensors are compared with it, unless --only names a part. The exit code is 1
if something is wrong.

Examples:
  tessera verify checkpoint/
  tessera verify model.pt --json
  tessera verify checkpoint/ --only model)";

}  // namespace

void add_verify(CLI::App& app, Common& common, Action& action) {
  const auto options = std::make_shared<VerifyArguments>();
  CLI::App* command =
      app.add_subcommand("verify", "Checks structure, coverage exactly once, and checksums");
  command->footer(kVerifyExamples);
  add_only(*command, options->only);
  command->add_option("checkpoint", options->path, "file or directory")->required();
  add_threads(*command, options->threads);
  add_open(*command, options->open);
  add_common(*command, common);
  add_local_cache(*command, common);
  command->callback(
      [=, &common, &action] { action = [=, &common] { return verify(*options, common); }; });
}

}  // namespace tessera::cli
