"""Reads the GPU kernels from a trace of `twobp bench --kernels`."""
import bisect
import json

OCCUPANCY = "est. achieved occupancy %"


def w_occupancy(path):
    """The share of a multiprocessor's warps that the kernels of W occupy. It is the mean, weighted by time, of the profiler's estimates, which
    follow from a kernel's grid, block, registers and shared memory. None if no kernel of W has an estimate."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    ranges = {}  # by thread
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"] == "W":
            ranges.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for its in ranges.values():
        its.sort()

    def within(event):
        its = ranges.get(event["tid"], [])
        at = bisect.bisect_right(its, (event["ts"], float("inf"))) - 1
        return at >= 0 and event["ts"] <= its[at][1]

    launched = {event["args"]["correlation"] for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver") and within(event)}
    kernels = [(event["dur"], event["args"][OCCUPANCY]) for event in events
               if event.get("cat") == "kernel" and event["args"].get("correlation") in launched and OCCUPANCY in event["args"]]
    seconds = sum(duration for duration, _ in kernels)
    return sum(duration * percent for duration, percent in kernels) / seconds / 100 if seconds else None
