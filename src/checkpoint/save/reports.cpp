#include "checkpoint/save/reports.h"

#include <cstring>
#include <unordered_map>
#include <utility>

#include "base/endian.h"
#include "base/host.h"
#include "comm/message.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::size_t kNamedFiles = 16;

RankReport read_report(MessageReader& message) {
  RankReport report;
  report.rank = message.number<std::int32_t>();
  report.host = message.text();
  for (auto count = message.count(); count > 0; --count) {
    FileReport file;
    file.file = static_cast<int>(message.count());
    file.digests.size = message.number<std::uint64_t>();
    for (auto blocks = message.count(); blocks > 0; --blocks)
      file.digests.blocks.push_back(message.number<std::uint64_t>());
    report.files.push_back(std::move(file));
  }
  return report;
}

template <typename Visit>
void for_each_file(const Reports& reports, const Visit& visit) {
  for (const RankReport& rank : reports.ranks) {
    for (const FileReport& file : rank.files) visit(rank, file);
  }
}

std::string ranks_place(const RankReport& rank) {
  return "rank " + std::to_string(rank.rank) + (rank.host.empty() ? "" : " on " + rank.host);
}

// A list of which the first are named.
class Named {
 public:
  void add(const std::string& text) {
    if (++count_ <= kNamedFiles) text_ += (count_ > 1 ? ", " : "") + text;
  }
  [[nodiscard]] std::size_t count() const { return count_; }
  [[nodiscard]] std::string text() const {
    return count_ <= kNamedFiles ? text_
                                 : text_ + " and " + std::to_string(count_ - kNamedFiles) + " more";
  }

 private:
  std::string text_;
  std::size_t count_ = 0;
};

std::unordered_map<std::string, std::uint64_t> sizes_in(const Store& store) {
  std::unordered_map<std::string, std::uint64_t> sizes;
  for (const ObjectInfo& object : store.list_level()) sizes.emplace(object.name, object.size);
  return sizes;
}

}  // namespace

std::string data_file_name(int rank, int file, const std::string& attempt) {
  return "__" + std::to_string(rank) + "_" + std::to_string(file) + "_" + attempt + ".distcp";
}

Bytes encode_report(const RankReport& report, std::uint64_t copies) {
  MessageWriter message;
  message.number(copies);
  message.number(static_cast<std::int32_t>(report.rank)).text(report.host);
  message.count(report.files.size());
  for (const FileReport& file : report.files) {
    message.count(static_cast<std::uint64_t>(file.file)).number(file.digests.size);
    message.count(file.digests.blocks.size());
    for (const std::uint64_t block : file.digests.blocks) message.number(block);
  }
  return message.take();
}

Bytes combine_reports(Bytes left, const Bytes& right) {
  MessageReader message(right);
  const std::uint64_t sum =
      MessageReader(left).number<std::uint64_t>() + message.number<std::uint64_t>();
  store_le(left.data(), sum);
  left.insert(left.end(), message.rest().begin(), message.rest().end());
  return left;
}

Reports decode_reports(const Bytes& bytes) {
  MessageReader message(bytes);
  Reports reports;
  reports.copies = message.number<std::uint64_t>();
  while (!message.at_end()) reports.ranks.push_back(read_report(message));
  return reports;
}

void require_planned(const Reports& reports, const SavePlan& plan, const std::string& attempt) {
  for_each_file(reports, [&](const RankReport& rank, const FileReport& file) {
    const std::uint64_t planned = plan.size_of(rank.rank, file.file);
    if (file.digests.size == planned) return;
    throw Error(ErrorCode::mismatch, ranks_place(rank) + " wrote " +
                                         std::to_string(file.digests.size) + " bytes into " +
                                         data_file_name(rank.rank, file.file, attempt) + ", " +
                                         std::to_string(planned) + " were planned");
  });
}

void require_in_store(const Reports& reports, const Store& store, const std::string& attempt) {
  const auto sizes = sizes_in(store);
  Named missing;
  for_each_file(reports, [&](const RankReport& rank, const FileReport& file) {
    const std::string name = data_file_name(rank.rank, file.file, attempt);
    const auto found = sizes.find(name);
    if (found == sizes.end()) {
      missing.add(name + " of " + ranks_place(rank));
    } else if (found->second != file.digests.size) {
      throw Error(ErrorCode::corrupt, ranks_place(rank) + " wrote " +
                                          std::to_string(file.digests.size) + " bytes into " +
                                          name + ", here it has " + std::to_string(found->second))
          .at_path(store.name());
    }
  });
  if (missing.count() == 0) return;
  throw Error(ErrorCode::incomplete,
              "rank 0 on " + host_name() + " does not see " + std::to_string(missing.count()) +
                  " of the data files that were written (" + missing.text() +
                  "): do the ranks write into different directories, or to disks of their own?")
      .at_path(store.name());
}

DigestsByName digests_of(const Reports& reports, const std::string& attempt) {
  DigestsByName digests;
  for_each_file(reports, [&](const RankReport& rank, const FileReport& file) {
    digests.emplace(data_file_name(rank.rank, file.file, attempt), file.digests);
  });
  return digests;
}

}  // namespace tessera
