#include "twobp/trace/timeline.h"

#include <cmath>
#include <unordered_map>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/trace/timeline_page.h"

namespace twobp {
namespace {

using nlohmann::ordered_json;

constexpr std::string_view kPlaceholder = "@TIMELINE_DATA@";

// Nanoseconds are as fine as the clock, and short in the file.
double rounded(double seconds) {
  return std::round(seconds * 1e9) / 1e9;
}

// Layer names are written once, and events refer to them.
class Names {
 public:
  int index(const std::string& name) {
    if (name.empty()) return -1;
    const auto [found, is_new] = index_.try_emplace(name, static_cast<int>(list_.size()));
    if (is_new) list_.push_back(name);
    return found->second;
  }
  const ordered_json& list() const { return list_; }

 private:
  std::unordered_map<std::string, int> index_;
  ordered_json list_ = ordered_json::array();
};

// In the order that timeline.html reads them.
ordered_json event_json(const Event& event, double origin, Names& names) {
  return {static_cast<int>(event.kind),
          rounded(event.begin - origin),
          rounded(event.end - event.begin),
          event.stage,
          event.micro_batch,
          event.count,
          event.part,
          names.index(event.name),
          event.peer,
          event.bytes,
          static_cast<int>(event.cause),
          event.held,
          event.total,
          event.peak};
}

ordered_json ranks_json(const StepReport& step, Names& names) {
  ordered_json ranks = ordered_json::array();
  for (const auto& events : step.events) {
    ordered_json list = ordered_json::array();
    for (const Event& event : events) list.push_back(event_json(event, step.begin, names));
    ranks.push_back({{"stages", stages_of(events)}, {"events", std::move(list)}});
  }
  return ranks;
}

ordered_json data_json(const Trace& trace) {
  Names names;
  ordered_json data = {{"title", trace.title}, {"simulated", trace.simulated}, {"abstract", trace.abstract}};
  data["slices"] = trace.run ? trace.run->schedule.slices : 1;
  data["facts"] = trace.facts;
  for (int cause = 0; cause < kIdleCauses; ++cause) {
    data["causes"].push_back(idle_text(static_cast<IdleCause>(cause)));
  }
  data["steps"] = ordered_json::array();
  for (size_t i = 0; i < trace.steps.size(); ++i) {
    const StepReport& step = trace.steps[i];
    data["steps"].push_back({{"name", i < trace.step_names.size() ? trace.step_names[i] : std::to_string(step.step)},
                             {"seconds", rounded(step.seconds())},
                             {"loss", step.loss},
                             {"ranks", ranks_json(step, names)}});
  }
  if (trace.predicted) {
    data["predicted"] = {{"seconds", rounded(trace.predicted->seconds())},
                         {"ranks", ranks_json(*trace.predicted, names)}};
  }
  data["names"] = names.list();
  return data;
}

// JSON that is valid in a <script>: "<" only occurs within strings, where its escape means the same.
std::string script_safe(const std::string& json) {
  std::string safe;
  safe.reserve(json.size());
  for (const char c : json) {
    if (c == '<') {
      safe += "\\u003c";
    } else {
      safe += c;
    }
  }
  return safe;
}

}  // namespace

std::string timeline_html(const Trace& trace) {
  std::string page;
  for (const char* part : kTimelinePage) page += part;
  const size_t at = page.find(kPlaceholder);
  TWOBP_CHECK(at != std::string::npos, "timeline.html has no ", kPlaceholder,
              ", which the data replaces: build twobp again");
  const std::string json =
      data_json(trace).dump(-1, ' ', /*ensure_ascii=*/true, ordered_json::error_handler_t::replace);
  return page.replace(at, kPlaceholder.size(), script_safe(json));
}

}  // namespace twobp
