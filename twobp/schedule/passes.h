// Rewrites of a schedule: where W goes, and the messages between ranks.
#pragma once

#include "twobp/schedule/schedule.h"

namespace twobp {

// Splits every B, and moves the W of a schedule that places them itself, by the policy:
//   off       B whole, in the place of I: standard backpropagation;
//   end       I in its place; one W per stage over all micro-batches at the end (last stage first);
//   cooldown  after each I that follows the stage's last F, the W of the oldest micro-batch whose W is
//             still pending; one W over the rest at the end;
//   fill      W where the schedule places it (B as I and W there), else as `end`; the executor and the
//   simulation run pending W,
//             oldest first, whenever the rank would wait for a message;
//   placed    as the schedule says. Throws Error for one that places no W.
Schedule apply_p2_policy(Schedule schedule, P2Policy policy);

// Adds RECV_F before F, SEND_F after F, RECV_B before I or B and SEND_B after it wherever the neighbouring
// stage lives on another rank. Stages on one rank hand over without a message.
// The last pass: throws Error when there are messages already.
Schedule add_communication(Schedule schedule);

}  // namespace twobp
