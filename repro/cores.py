"""Measures whether the cores of this machine are real cores. Virtual ones may share one core of the host, for minutes and without notice."""
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
    """The rounds that each core completed while all of them worked."""
    context = multiprocessing.get_context("fork")
    start, answers = context.Barrier(len(cores)), context.SimpleQueue()
    workers = [context.Process(target=lambda core=core: answers.put(_rate(core, seconds, start)), daemon=True) for core in cores]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return [answers.get() for _ in cores]


def speed_at_once(seconds=0.5):
    """The speed of the slowest core when all work, over that of the fastest alone. It is near 1 on a quiet machine with real cores."""
    cores = sorted(os.sched_getaffinity(0))[:16]
    alone = [_rates([core], seconds)[0] for core in cores[:2]]
    return round(min(_rates(cores, seconds)) / max(alone), 2)
