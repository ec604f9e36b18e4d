#include "twobp/schedule/schedule_source.h"

#include <algorithm>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/schedule/check/validate.h"
#include "twobp/schedule/csv.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/passes.h"

namespace twobp {
namespace {

// Where "@POLICY" begins, or the end. A file's name may have an "@".
size_t end_of_source(std::string_view text) {
  return ScheduleSource::is_file(text) ? text.size() : std::min(text.rfind('@'), text.size());
}

}  // namespace

ScheduleSource::ScheduleSource(std::string_view name_or_file) : name_(name_or_file) {
  if (is_file(name_or_file)) written_ = std::make_shared<const Schedule>(read_csv(name_));
}

ScheduleSource::ScheduleSource(Schedule written)
    : name_(written.name), written_(std::make_shared<const Schedule>(std::move(written))) {}

std::vector<int> ScheduleSource::rank_of_stage(int stages, int ranks) const {
  if (written_) {
    TWOBP_CHECK(stages == 0 || stages == written_->stages, name_, " is a schedule of ", written_->stages,
                " stages, not of ", stages, ": set ", written_->stages, ", or 0 for its own number");
    TWOBP_CHECK(ranks == 0 || ranks == written_->rank_count(), name_, " is a schedule of ", written_->rank_count(),
                " ranks, not of ", ranks, ": set ", written_->rank_count(), ", or 0 for its own number");
    return written_->rank_of_stage;
  }
  const Placement placement = named_schedule(name_).placement;
  const int usual = usual_stages_per_rank(placement);
  if (ranks == 0) ranks = stages > 0 ? default_ranks(name_, stages) : 2;
  return place_stages(placement, stages > 0 ? stages : usual * ranks, ranks);
}

int ScheduleSource::default_micro_batches(int stages, int ranks) const {
  return written_ ? written_->micro_batches / written_->slices : twobp::default_micro_batches(name_, stages, ranks);
}

bool ScheduleSource::places_p2() const {
  return written_ ? written_->policy == P2Policy::kPlaced : named_schedule(name_).places_p2;
}

P2Policy ScheduleSource::default_policy() const {
  return written_ ? written_->policy : P2Policy::kFill;
}

Schedule ScheduleSource::make(int stages, int ranks, int micro_batches, P2Policy policy, int slices,
                              bool frozen_stages) const {
  if (!written_ && frozen_stages) {
    Schedule schedule = make_schedule(name_, stages - ranks, micro_batches, policy, ranks, slices);
    schedule = after_frozen_stages(std::move(schedule));
    validate(schedule);
    return schedule;
  }
  if (!written_) return make_schedule(name_, stages, micro_batches, policy, ranks, slices);
  rank_of_stage(stages, ranks);
  TWOBP_CHECK(slices == written_->slices, name_, " is a schedule of ", written_->slices,
              " slices for each micro-batch, not of ", slices, ": use a named schedule, or set pipeline.slices to ",
              written_->slices);
  const int most = written_->micro_batches / written_->slices;
  TWOBP_CHECK(micro_batches <= most, name_, " is a schedule of ", most, " micro-batches, not of ", micro_batches,
              ": write one with more, or run fewer");
  Schedule schedule = keep_micro_batches(*written_, micro_batches * slices);
  // The cells of a schedule with placed W stay as they are, even if fewer micro-batches leave only B.
  const bool as_written = policy == P2Policy::kPlaced && written_->policy == P2Policy::kPlaced;
  schedule = add_communication(as_written ? schedule : apply_p2_policy(schedule, policy));
  validate(schedule);
  return schedule;
}

bool can_have_frozen_stages(const ScheduleSource& schedule, int ranks, int stages, int first_trainable, int layers) {
  const bool named = schedule.written() == nullptr && schedule.name() != "auto";
  return named && ranks > 1 && first_trainable >= ranks && layers - first_trainable >= stages;
}

AskedSchedule::AskedSchedule(std::string_view text) : source(text.substr(0, end_of_source(text))) {
  const size_t end = end_of_source(text);
  if (end < text.size()) policy = parse_policy(std::string(text.substr(end + 1)));
}

}  // namespace twobp
