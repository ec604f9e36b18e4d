#!/usr/bin/env python3
"""Schedules small pipelines to proven optimality with CP-SAT (OR-tools). The auto-scheduler is measured against them.

    optimal_schedules.py make FILE [--seconds 30]     draw the cases, solve them, write them with their optima
    optimal_schedules.py check FILE [--cases 4]       solve some cases of FILE again, fail if an optimum differs

`make` keeps the cases that FILE has solved already, so that it can be interrupted. It shares no code with the scheduler. The
model is that of schedule/simulate/simulate.h with whole W (p2_units 1). A rank runs one op at a time. F, I and W of a stage
run in micro-batch order. A message takes `message_seconds` between ranks. Activations are held from the start of F to the end
of I, the stash from there to the end of W. I and W of a micro-batch may be fused to B, which has no stash and sends dL/dx
only at its end. All numbers are whole, as CP-SAT requires. `check` exits with 77 if OR-tools is missing.
"""
import argparse
import json
import os
import random
import sys

CASES = 160
FORMAT = "twobp optimal schedules 1"


def place(placement, ranks):
    if placement == "linear":
        return list(range(ranks))
    if placement == "v":
        return [min(s, 2 * ranks - 1 - s) for s in range(2 * ranks)]
    return [s % ranks for s in range(2 * ranks)]


def draw(number):
    """Returns case `number`. The cases vary the placement, the costs, the messages, the caps and the optimizer."""
    rng = random.Random(number)
    placement = ["linear", "v", "linear", "v", "looped"][number % 5]
    ranks = rng.randint(2, 4)
    micro_batches = rng.randint(1, 6)
    rank_of_stage = place(placement, ranks)
    stages = len(rank_of_stage)
    kind = rng.choice(["equal", "stages", "any"])
    shared = {"forward": rng.randint(1, 6), "backward_p1": rng.randint(1, 6), "backward_p2": rng.randint(1, 6)}
    costs = []
    for _ in range(stages):
        cost = dict(shared)
        if kind == "stages":  # stages differ by a factor
            factor = rng.randint(1, 4)
            cost = {key: value * factor for key, value in shared.items()}
        if kind == "any":
            cost = {key: rng.randint(1, 9) for key in shared}
        cost["activation_bytes"] = rng.randint(1, 6)
        cost["stash_bytes"] = rng.randint(0, cost["activation_bytes"] + 2 if rng.random() < 0.4 else 4)
        cost["optimizer"] = rng.choice([0, 0, rng.randint(1, 5)])
        costs.append(cost)
    cap = []
    if rng.random() < 0.6:
        for rank in range(ranks):
            held = sum(c["activation_bytes"] for s, c in enumerate(costs) if rank_of_stage[s] == rank)
            cap.append(held + rng.randint(0, 2 * held))  # `held` is the smallest cap that fits
    return {
        "number": number, "placement": placement, "rank_of_stage": rank_of_stage, "micro_batches": micro_batches,
        "message_seconds": rng.choice([0, 0, 1, 2]), "cap_per_rank": cap, "costs": costs,
    }


def solve(case, seconds):
    """Returns (status, makespan, proven lower bound)."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    costs, m_count, message = case["costs"], case["micro_batches"], case["message_seconds"]
    rank_of_stage, cap = case["rank_of_stage"], case["cap_per_rank"]
    stages = len(costs)
    horizon = sum(m_count * (c["forward"] + c["backward_p1"] + c["backward_p2"] + 2 * message) + c["optimizer"]
                  for c in costs)
    makespan = model.new_int_var(0, horizon, "makespan")
    key = {"F": "forward", "I": "backward_p1", "W": "backward_p2"}
    start, end = {}, {}
    on_rank = {rank: [] for rank in rank_of_stage}
    for s in range(stages):
        for m in range(m_count):
            for op in "FIW":
                begin = model.new_int_var(0, horizon, f"{s}{op}{m}")
                start[op, s, m], end[op, s, m] = begin, begin + costs[s][key[op]]
                interval = model.new_fixed_size_interval_var(begin, costs[s][key[op]], f"{s}{op}{m}")
                on_rank[rank_of_stage[s]].append(interval)
    for intervals in on_rank.values():
        model.add_no_overlap(intervals)

    demands = {rank: ([], []) for rank in on_rank}
    for s in range(stages):
        rank = rank_of_stage[s]
        optimizer = sum(c["optimizer"] for other, c in enumerate(costs) if rank_of_stage[other] == rank)
        for m in range(m_count):
            for op in "FIW":
                model.add(makespan >= end[op, s, m] + optimizer)
                if m > 0:
                    model.add(start[op, s, m] >= end[op, s, m - 1])
            model.add(start["I", s, m] >= end["F", s, m])
            model.add(start["W", s, m] >= end["I", s, m])
            fused = model.new_bool_var(f"fused {s} {m}") if cap else None
            if s > 0:
                way = message if rank_of_stage[s - 1] != rank else 0
                model.add(start["F", s, m] >= end["F", s - 1, m] + way)
                model.add(start["I", s - 1, m] >= end["I", s, m] + way)
                if cap:
                    model.add(start["I", s - 1, m] >= end["W", s, m] + way).only_enforce_if(fused)
            if cap:
                # The activations stay until `given_up`, which is the end of I, or of W if it is fused to B.
                model.add(start["W", s, m] == end["I", s, m]).only_enforce_if(fused)
                given_up = model.new_int_var(0, horizon, f"given up {s} {m}")
                model.add(given_up == end["I", s, m]).only_enforce_if(fused.Not())
                model.add(given_up == end["W", s, m]).only_enforce_if(fused)
                for begin, finish, amount in ((start["F", s, m], given_up, costs[s]["activation_bytes"]),
                                              (given_up, end["W", s, m], costs[s]["stash_bytes"])):
                    size = model.new_int_var(0, horizon, "")
                    demands[rank][0].append(model.new_interval_var(begin, size, finish, ""))
                    demands[rank][1].append(amount)
    for rank, (intervals, amounts) in demands.items():
        if cap:
            model.add_cumulative(intervals, amounts, cap[rank])

    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 4
    status = solver.status_name(solver.solve(model))
    if status not in ("OPTIMAL", "FEASIBLE"):
        return status, None, None
    return status, int(solver.objective_value), int(solver.best_objective_bound)


def make(path, seconds):
    solved = {}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            solved = {case["number"]: case for case in json.load(file)["cases"]}
    cases = []
    for number in range(CASES):
        case = solved.get(number)
        if case is None:
            case = draw(number)
            case["status"], case["makespan"], case["bound"] = solve(case, seconds)
            solved[number] = case
            print(f"{number}: {case['placement']}, {case['status']}, {case['makespan']}, at least {case['bound']}",
                  flush=True)
        cases = [solved[n] for n in sorted(solved)]
        lines = ",\n".join(json.dumps(entry) for entry in cases)
        with open(path + ".new", "w", encoding="utf-8") as file:
            file.write(f'{{"format": "{FORMAT}", "made by": "tests/plan/optimal_schedules.py make", "cases": [\n'
                       f"{lines}\n]}}\n")
        os.replace(path + ".new", path)
    proven = sum(case["status"] == "OPTIMAL" for case in cases)
    print(f"{proven} of {len(cases)} cases solved to optimality")


def check(path, count, seconds):
    with open(path, encoding="utf-8") as file:
        cases = json.load(file)["cases"]
    cases = [case for case in cases if case["status"] == "OPTIMAL"]
    cases.sort(key=lambda case: len(case["costs"]) * case["micro_batches"])
    some = cases[:: max(1, len(cases) // (2 * count))][:count]  # evenly from the smaller half
    for case in some:
        if {key: case[key] for key in draw(case["number"])} != draw(case["number"]):
            sys.exit(f"case {case['number']} is not the one that `make` draws: make {path} again")
        status, makespan, _ = solve(case, seconds)
        if status != "OPTIMAL" or makespan != case["makespan"]:
            sys.exit(f"case {case['number']}: {path} has {case['makespan']}, CP-SAT finds {makespan} ({status})")
    print(f"{len(some)} cases solved again, same optima")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["make", "check"])
    parser.add_argument("file")
    parser.add_argument("--seconds", type=float, default=30, help="limit of one case")
    parser.add_argument("--cases", type=int, default=4, help="how many to check")
    arguments = parser.parse_args()
    try:
        import ortools.sat.python.cp_model  # noqa: F401
    except ImportError:
        print("OR-tools is not installed: pip install -r tests/requirements.txt")
        sys.exit(77)
    if arguments.command == "make":
        make(arguments.file, arguments.seconds)
    else:
        check(arguments.file, arguments.cases, arguments.seconds)


if __name__ == "__main__":
    main()
