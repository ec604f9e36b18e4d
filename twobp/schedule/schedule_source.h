// Where a schedule to run comes from: its name in the table, or one that somebody wrote down. Whoever runs
// schedules takes one of these and need not know which.
#pragma once

#include <memory>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "twobp/schedule/schedule.h"

namespace twobp {

class ScheduleSource {
 public:
  // What ends in ".csv" is a file in the text form (csv.h), which is read now; anything else is a name of
  // named_schedules.h. Throws Error for a file that is none; a name is looked up when it is used.
  ScheduleSource(std::string_view name_or_file);  // NOLINT(google-explicit-constructor)
  ScheduleSource(const char* name_or_file)        // NOLINT(google-explicit-constructor)
      : ScheduleSource(std::string_view(name_or_file)) {}
  ScheduleSource(const std::string& name_or_file)  // NOLINT(google-explicit-constructor)
      : ScheduleSource(std::string_view(name_or_file)) {}
  // F, B, I and W without messages.
  explicit ScheduleSource(Schedule written);

  static bool is_file(std::string_view text) { return text.ends_with(".csv"); }

  const std::string& name() const { return name_; }
  // Null for a named one, which is made for the stages, ranks and micro-batches that are asked for.
  const Schedule* written() const { return written_.get(); }

  // Where each stage is. 0 for stages or ranks: as the schedule has it, or 2 ranks where it is made to
  // measure. Throws Error when they do not fit the schedule.
  std::vector<int> rank_of_stage(int stages, int ranks) const;
  // Its own number, or that of named_schedules.h.
  int default_micro_batches(int stages, int ranks) const;
  // The policy it has unless it is told: placed where it places W itself, else fill.
  P2Policy default_policy() const;
  // Ready to run: p2 policy, messages, validated. A written one has its own stages and ranks; for fewer
  // micro-batches than it has (the rest of an epoch), the cells of the missing ones are dropped. Throws Error
  // when it cannot be had.
  Schedule make(int stages, int ranks, int micro_batches, P2Policy policy) const;

  friend std::ostream& operator<<(std::ostream& out, const ScheduleSource& source) {
    return out << source.name_;
  }

 private:
  std::string name_;
  std::shared_ptr<const Schedule> written_;
};

}  // namespace twobp
