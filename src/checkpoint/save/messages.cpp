#include "checkpoint/save/messages.h"

#include <cstring>
#include <span>
#include <utility>

#include "base/digest.h"
#include "base/numbers.h"
#include "base/process.h"
#include "base/text.h"
#include "checkpoint/save/data_files.h"
#include "tessera/error.h"

namespace tessera {

std::uint64_t digest_of(const std::vector<PlannedLeaf>& leaves) {
  RunningDigest digest;
  for (const PlannedLeaf& leaf : leaves) {
    MessageWriter message;
    write_leaf(message, leaf);
    digest.add(message.take());
  }
  return digest.value();
}

void join_intents(Intents& all, const Intents& more) {
  all.same_leaves = all.same_leaves && more.same_leaves && all.first.leaves == more.first.leaves;
  all.same_values = all.same_values && more.same_values && all.first.values == more.first.values;
  all.first.tells = all.first.tells || more.first.tells;
  all.unseeing.add(more.unseeing);
}

namespace {

RankReport read_report(MessageReader& message, bool are_compressed) {
  RankReport report;
  report.rank = message.number<std::int32_t>();
  report.host = message.text();
  for (auto count = message.count(); count > 0; --count) {
    FileReport file;
    file.file = static_cast<int>(message.count());
    file.digest.size = message.number<std::uint64_t>();
    file.digest.tail = message.number<std::uint64_t>();
    if (are_compressed) file.items = message.count();
    for (std::uint64_t i = 0; i < file.items; ++i) report.lengths.push_back(message.count());
    report.files.push_back(file);
  }
  return report;
}

// The size of a compressed file whose items have these lengths; 0 if there are not as many as
// planned.
std::uint64_t size_with(std::span<const std::uint64_t> lengths, std::uint64_t items) {
  if (lengths.size() != items) return 0;
  std::uint64_t end = 0;
  for (const std::uint64_t length : lengths) end = checked_add(end, length);
  return end + tail_size(end, items);
}

void require_all_written(const FilePlan& plan, int rank, std::size_t written) {
  std::size_t planned = 0;
  for (int file = 0; file < plan.files_of(rank); ++file)
    planned += plan.items_of(rank, file) > 0 ? 1 : 0;
  if (written == planned) return;
  throw Error(ErrorCode::mismatch, "rank " + std::to_string(rank) + " wrote " +
                                       std::to_string(written) + " data files, " +
                                       std::to_string(planned) + " were planned");
}

template <typename Visit>
void for_each_file(const Reports& reports, const Visit& visit) {
  for (const RankReport& rank : reports.ranks) {
    for (const FileReport& file : rank.files) visit(rank, file);
  }
}

std::string ranks_place(const RankReport& rank) {
  return rank_on_host(rank.rank, rank.host);
}

}  // namespace

Bytes encode_report(const RankReport& report, std::uint64_t copies, bool are_compressed) {
  MessageWriter message;
  message.number(copies);
  message.number(static_cast<std::int32_t>(report.rank)).text(report.host);
  message.count(report.files.size());
  auto length = report.lengths.begin();
  for (const FileReport& file : report.files) {
    message.count(static_cast<std::uint64_t>(file.file)).number(file.digest.size);
    message.number(file.digest.tail);
    if (!are_compressed) continue;
    message.count(file.items);
    for (std::uint64_t i = 0; i < file.items; ++i) message.count(*length++);
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

Reports decode_reports(const Bytes& bytes, bool are_compressed) {
  MessageReader message(bytes);
  Reports reports;
  reports.copies = message.number<std::uint64_t>();
  while (!message.at_end()) reports.ranks.push_back(read_report(message, are_compressed));
  return reports;
}

void require_planned(const Reports& reports, const SavePlan& plan, const std::string& attempt) {
  std::vector<std::size_t> written(static_cast<std::size_t>(plan.rules().ranks), 0);  // files
  for (const RankReport& rank : reports.ranks) {
    std::span<const std::uint64_t> lengths(rank.lengths);
    for (const FileReport& file : rank.files) {
      const std::uint64_t planned =
          plan.rules().files.are_compressed()
              ? size_with(lengths.first(file.items), plan.files().items_of(rank.rank, file.file))
              : plan.size_of(rank.rank, file.file);
      lengths = lengths.subspan(file.items);
      if (file.digest.size == planned) continue;
      throw Error(ErrorCode::mismatch, ranks_place(rank) + " wrote " +
                                           std::to_string(file.digest.size) + " bytes into " +
                                           data_file_name(rank.rank, file.file, attempt) + ", " +
                                           std::to_string(planned) + " were planned");
    }
    written.at(static_cast<std::size_t>(rank.rank)) += rank.files.size();
  }
  for (int rank = 0; rank < plan.rules().ranks; ++rank)
    require_all_written(plan.files(), rank, written[static_cast<std::size_t>(rank)]);
}

void require_in_store(const Reports& reports, const Listed& there, const std::string& attempt,
                      const Looking& looking) {
  std::vector<Sought> sought;
  for_each_file(reports, [&](const RankReport& rank, const FileReport& file) {
    sought.push_back(
        {data_file_name(rank.rank, file.file, attempt), ranks_place(rank), file.digest.size});
  });
  require_in_store(sought, there.store, there.objects, looking);
}

DigestsByName digests_of(const Reports& reports, const std::string& attempt) {
  DigestsByName digests;
  for_each_file(reports, [&](const RankReport& rank, const FileReport& file) {
    digests.emplace(data_file_name(rank.rank, file.file, attempt),
                    FileDigests{file.digest.size, {}, 0, file.digest.tail});
  });
  return digests;
}

}  // namespace tessera
