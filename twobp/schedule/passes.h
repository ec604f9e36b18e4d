// Rewrites of a schedule: they place W, and add the messages between ranks.
#pragma once

#include "twobp/schedule/schedule.h"

namespace twobp {

// Splits every B, and moves the W of a schedule that places W itself, by the policy:
//   off       B whole, in the place of I: standard backpropagation;
//   end       I in its place; one W per stage over all micro-batches at the end (last stage first);
//   cooldown  after each I that follows the stage's last F, the W of the oldest micro-batch whose W is
//             still pending; one W over the rest at the end;
//   fill      W where the schedule places it (B as I and W there), else as `end`. The executor and the
//             simulation run pending W, oldest first, whenever the rank would wait for a message;
//   placed    as the schedule says. Throws Error for a schedule that places no W.
Schedule apply_p2_policy(Schedule schedule, P2Policy policy);

// Adds RECV_F before F, SEND_F after F, RECV_B before I or B and SEND_B after it, if the neighbouring stage is on
// another rank. Stages on one rank hand over without a message.
// This is the last pass. Throws Error if there are messages already.
Schedule add_communication(Schedule schedule);

// Puts a chain of frozen stages before a schedule that is ready to run, one on each rank. Their F run ahead of the rest
// by up to two micro-batches for each rank, so that no rank waits for them, and as few outputs as that are kept.
Schedule after_frozen_stages(Schedule schedule);

// The schedule without the cells of micro-batches from `micro_batches` on. The others keep their order, so a valid
// schedule stays valid. Throws Error if the schedule has fewer.
Schedule keep_micro_batches(Schedule schedule, int micro_batches);

}  // namespace twobp
