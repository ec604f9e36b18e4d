// The source of a schedule to run: a name in the table, or a written schedule. Code that runs schedules takes one of
// these and need not know which.
#pragma once

#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "twobp/schedule/schedule.h"

namespace twobp {

class ScheduleSource {
 public:
  // Text that ends in ".csv" names a file in the text form (csv.h), which is read now. Any other text is a name of
  // named_schedules.h, which is looked up when it is used. Throws Error if the file is not a schedule.
  ScheduleSource(std::string_view name_or_file);  // NOLINT(google-explicit-constructor)
  ScheduleSource(const char* name_or_file)        // NOLINT(google-explicit-constructor)
      : ScheduleSource(std::string_view(name_or_file)) {}
  ScheduleSource(const std::string& name_or_file)  // NOLINT(google-explicit-constructor)
      : ScheduleSource(std::string_view(name_or_file)) {}
  // `written` has F, B, I and W, without messages.
  explicit ScheduleSource(Schedule written);

  static bool is_file(std::string_view text) { return text.ends_with(".csv"); }

  const std::string& name() const { return name_; }
  bool operator==(const ScheduleSource& other) const {
    const bool same = written_ == other.written_ || (written_ && other.written_ && *written_ == *other.written_);
    return name_ == other.name_ && same;
  }
  // Null for a named schedule, which is made for the requested stages, ranks and micro-batches.
  const Schedule* written() const { return written_.get(); }

  // The rank of each stage. 0 for stages or ranks: the schedule's own number, or 2 ranks if it has none. Throws Error
  // if they do not fit the schedule.
  std::vector<int> rank_of_stage(int stages, int ranks) const;
  // The written schedule's number, or that of named_schedules.h.
  int default_micro_batches(int stages, int ranks) const;
  // Whether the schedule itself says where W runs.
  bool places_p2() const;
  // The default policy: a written schedule runs as written (placed if it has W, else off), others fill.
  P2Policy default_policy() const;
  // The schedule ready to run: with p2 policy and messages, and validated. A written one has its own stages and ranks.
  // If `micro_batches` is less than its number (at the end of an epoch), the cells of the missing ones are dropped. A
  // written one has its own number of slices, too. With `frozen_stages`, a named schedule's stages come after one of
  // each rank with frozen layers (after_frozen_stages), and `stages` counts all. Throws Error if this is not possible.
  Schedule make(int stages, int ranks, int micro_batches, P2Policy policy, int slices = 1,
                bool frozen_stages = false) const;

  friend std::ostream& operator<<(std::ostream& out, const ScheduleSource& source) { return out << source.name_; }

 private:
  std::string name_;
  std::shared_ptr<const Schedule> written_;
};

// Whether stages of frozen layers alone, one on each rank, may come before this schedule's: those that are written or
// searched for have the stages that they have. `first_trainable`: the number of frozen first layers.
bool can_have_frozen_stages(const ScheduleSource& schedule, int ranks, int stages, int first_trainable, int layers);

// An entry of a list of schedules to compare: NAME, FILE.csv, NAME@POLICY or FILE.csv@POLICY.
struct AskedSchedule {
  // Throws Error as ScheduleSource does, and for an unknown policy.
  AskedSchedule(std::string_view text);                                       // NOLINT(google-explicit-constructor)
  AskedSchedule(const char* text) : AskedSchedule(std::string_view(text)) {}  // NOLINT(google-explicit-constructor)
  AskedSchedule(const std::string& text)                                      // NOLINT(google-explicit-constructor)
      : AskedSchedule(std::string_view(text)) {}

  ScheduleSource source;
  std::optional<P2Policy> policy;  // the one after "@"
};

}  // namespace twobp
