"""Writes the schedules of PyTorch's own generators as its CSV (compute only) next to this file:
NAME_RANKSxSTAGES-A-RANK_MICROBATCHES.csv. The test that compares is tests/schedule/pytorch_test.cpp.

    python3 tests/golden/pytorch/make.py [FOLDER]

Made with PyTorch 2.13.0. No process group is needed: the generators ask a stage only for its numbers.
"""

import pathlib
import sys

import torch
from torch.distributed.pipelining import schedules

# Name here, PyTorch's class, placement, and (ranks, stages a rank, micro-batches).
CASES = [
    ("interleaved-1f1b", schedules.ScheduleInterleaved1F1B, "loop",
     [(1, 2, 3), (2, 2, 2), (2, 2, 4), (2, 3, 6), (3, 2, 2), (3, 2, 4), (4, 2, 8), (4, 3, 10),
      (4, 4, 12)]),
    ("interleaved-zb", schedules.ScheduleInterleavedZeroBubble, "loop",
     [(2, 2, 2), (2, 2, 4), (3, 2, 6), (4, 2, 8), (4, 3, 8)]),
    ("looped-bfs", schedules.ScheduleLoopedBFS, "loop", [(1, 2, 2), (2, 2, 4), (3, 2, 5), (4, 3, 3)]),
    ("zb-v", schedules.ScheduleZBVZeroBubble, "v",
     [(1, 2, 2), (2, 2, 1), (2, 2, 2), (2, 2, 4), (3, 2, 8), (4, 2, 5), (4, 2, 8), (4, 2, 16)]),
    ("dualpipe-v", schedules.ScheduleDualPipeV, "v",
     [(1, 2, 2), (2, 2, 4), (3, 2, 8), (4, 2, 8), (4, 2, 12)]),
]


class Stage:
    """What a generator asks of a stage, and nothing to run."""

    def __init__(self, index, rank, ranks, stages):
        self.stage_index, self.group_rank, self.group_size, self.num_stages = index, rank, ranks, stages
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.has_backward = True
        self.group = None
        self.device = torch.device("cpu")
        self.submod = torch.nn.Identity()
        self.stage_index_to_group_rank = {i: i % ranks for i in range(stages)}


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent
    for name, kind, placement, sizes in CASES:
        for ranks, per_rank, micro_batches in sizes:
            stages = ranks * per_rank
            mine = [0, stages - 1] if placement == "v" else list(range(0, stages, ranks))
            schedule = kind([Stage(i, 0, ranks, stages) for i in mine], micro_batches)
            path = folder / f"{name}_{ranks}x{per_rank}_{micro_batches}.csv"
            rows = [schedule.pipeline_order[rank] for rank in range(ranks)]
            text = "\n".join(",".join("" if a is None else str(a) for a in row) for row in rows) + "\n"
            path.write_text(text)


if __name__ == "__main__":
    main()
