#include "tessera/trace.h"

#include <array>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "comm/message.h"
#include "fsdp/unit/registry.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

constexpr std::array<std::string_view, 11> kNames{
    "start_gather",  "wait_gather",   "finish_gather",  "free",
    "enter_forward", "leave_forward", "enter_backward", "leave_backward",
    "start_reduce",  "wait_reduce",   "finish_reduce"};

// Lanes of computing are nested calls of one thread; a gather or reduction may overlap another one,
// so those are asynchronous events, which viewers stack.
struct Lane {
  const char* name;
  bool is_call;
  TraceStep begin;
  TraceStep end;
};
constexpr std::array<Lane, 6> kLanes{{
    {"forward", true, TraceStep::enter_forward, TraceStep::leave_forward},
    {"backward", true, TraceStep::enter_backward, TraceStep::leave_backward},
    {"wait for gather", true, TraceStep::wait_gather, TraceStep::finish_gather},
    {"wait for reduction", true, TraceStep::wait_reduce, TraceStep::finish_reduce},
    {"gather", false, TraceStep::start_gather, TraceStep::finish_gather},
    {"reduce", false, TraceStep::start_reduce, TraceStep::finish_reduce},
}};

double microseconds(std::chrono::steady_clock::time_point at) {
  return std::chrono::duration<double, std::micro>(at.time_since_epoch()).count();
}

// One rank's events. What began before the recording or had not ended with it is left out.
class ChromeEvents {
 public:
  explicit ChromeEvents(int rank) : rank_(rank) {
    all_.push_back({{"ph", "M"},
                    {"pid", rank},
                    {"name", "process_name"},
                    {"args", {{"name", "rank " + std::to_string(rank)}}}});
  }

  void add(const TraceEvent& event) {
    for (const auto& lane : kLanes) {
      if (lane.end == event.step) close(lane, event);
      if (lane.begin == event.step) open_[{lane.name, event.unit}] = event.at;
    }
    if (event.step == TraceStep::finish_gather) count(event, event.bytes);
    if (event.step == TraceStep::free) count(event, -static_cast<double>(event.bytes));
  }

  [[nodiscard]] const Json& all() const noexcept { return all_; }

 private:
  void close(const Lane& lane, const TraceEvent& event) {
    const auto found = open_.find({lane.name, event.unit});
    if (found == open_.end()) return;
    const auto from = found->second;
    open_.erase(found);
    const auto unit = event.unit.empty() ? std::string("(root)") : event.unit;
    Json common{{"name", std::string(lane.name) + " " + unit}, {"cat", lane.name}, {"pid", rank_}};
    if (lane.is_call) {
      common.update({{"ph", "X"}, {"tid", 0}, {"ts", microseconds(from)}});
      common["dur"] = microseconds(event.at) - microseconds(from);
      all_.push_back(std::move(common));
      return;
    }
    common.update({{"tid", lane.name}, {"id", next_id_++}});
    Json begin = common;
    begin.update({{"ph", "b"}, {"ts", microseconds(from)}});
    common.update({{"ph", "e"}, {"ts", microseconds(event.at)}});
    all_.push_back(std::move(begin));
    all_.push_back(std::move(common));
  }

  void count(const TraceEvent& event, double change) {
    gathered_ += change;
    if (gathered_ < 0) gathered_ = 0;  // gathered before the recording
    all_.push_back({{"ph", "C"},
                    {"pid", rank_},
                    {"name", "gathered parameters"},
                    {"ts", microseconds(event.at)},
                    {"args", {{"bytes", gathered_}}}});
  }

  int rank_;
  int next_id_ = 0;
  double gathered_ = 0;
  std::map<std::pair<std::string, std::string>, std::chrono::steady_clock::time_point> open_;
  Json all_ = Json::array();
};

void write_file(const std::string& path, const std::vector<Bytes>& ranks) {
  auto all = Json::array();
  for (const auto& bytes : ranks) {
    for (auto& event : Json::parse(to_text(bytes))) all.push_back(std::move(event));
  }
  std::ofstream file(path);
  file << Json{{"traceEvents", std::move(all)}, {"displayTimeUnit", "ms"}}.dump() << "\n";
  file.flush();
  if (!file) throw Error(ErrorCode::io, std::strerror(errno)).at_path(path);
}

}  // namespace

std::string_view to_string(TraceStep step) noexcept {
  return kNames[static_cast<std::size_t>(step)];
}

Trace::Trace(ModuleRef module) : events_(std::make_shared<std::vector<TraceEvent>>()) {
  const auto units = detail::units_below(module.get());
  for (const auto& [name, unit] : units) {
    if (unit->trace)
      throw Error(ErrorCode::invalid_argument, "a trace of this unit is being recorded already")
          .at_key(name);
  }
  for (const auto& [name, unit] : units) {
    unit->trace = events_;
    units_.push_back(unit);
  }
}

Trace::~Trace() {
  for (const auto& weak : units_) {
    if (const auto unit = weak.lock()) unit->trace = nullptr;
  }
}

void Trace::write(const std::string& path, const Mesh& mesh) const {
  ChromeEvents mine(mesh.rank());
  for (const auto& event : *events_) mine.add(event);
  const auto ranks = mesh.group().gather(to_bytes(mine.all().dump()));
  agree(mesh.group(), "writing a trace", [&] {
    if (mesh.rank() == 0) write_file(path, ranks);
  });
}

}  // namespace tessera
