"""Whether the machine's cores are cores: virtual ones may share one of the host's, for minutes and unannounced."""
import multiprocessing
import os
import time


def _rate(core, seconds, start):
    os.sched_setaffinity(0, {core})
    if start is not None:
        start.wait()
    end, rounds = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        sum(range(10000))
        rounds += 1
    return rounds


def _rates(cores, seconds):
    """Rounds that each got done, all at once."""
    context = multiprocessing.get_context("fork")
    start, answers = context.Barrier(len(cores)), context.SimpleQueue()
    workers = [context.Process(target=lambda core=core: answers.put(_rate(core, seconds, start)), daemon=True) for core in cores]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return [answers.get() for _ in cores]


def speed_at_once(seconds=0.5):
    """Speed of the slowest core when all work, over that of the fastest alone: near 1 on a quiet machine of real cores."""
    cores = sorted(os.sched_getaffinity(0))[:16]
    alone = [_rates([core], seconds)[0] for core in cores[:2]]
    return round(min(_rates(cores, seconds)) / max(alone), 2)
