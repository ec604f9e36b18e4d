"""Runs one program and watches it from outside, in the same way for every contender of compare.py.

It waits until no other program uses the cores, starts the program and samples the memory of all its processes from /proc. It also reports how much of the cores other
programs used meanwhile.
"""
import dataclasses
import glob
import os
import resource
import signal
import subprocess
import tempfile
import time

POLL_SECONDS = 0.1
QUIET_WINDOW_SECONDS = 0.5
QUIET_SHARE = 0.04
TICK = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass
class ProcessMemory:
    peak_resident: int = 0   # bytes, VmHWM: the high-water mark of the kernel
    peak_anonymous: int = 0  # bytes, the largest sample of RssAnon, without shared pages of libraries


@dataclasses.dataclass
class Outcome:
    exit_code: int
    stdout: str
    stderr: str
    memory: dict          # process id -> ProcessMemory
    foreign_share: float  # share of the cores' time that other programs used during the run
    quiet: bool           # whether the cores were quiet before the run


def busy_seconds(cores):
    """The CPU time that all programs have used on these cores, stolen time included."""
    names, total = {f"cpu{core}" for core in cores}, 0
    with open("/proc/stat") as stat:
        for line in stat:
            fields = line.split()
            if fields[0] in names:
                user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[1:9])
                total += user + nice + system + irq + softirq + steal
    return total / TICK


def wait_until_quiet(cores, patience_seconds):
    """Whether the cores became quiet in that time. It looks at least once."""
    end = time.monotonic() + patience_seconds
    while True:
        before = busy_seconds(cores)
        time.sleep(QUIET_WINDOW_SECONDS)
        if (busy_seconds(cores) - before) / QUIET_WINDOW_SECONDS / len(cores) < QUIET_SHARE:
            return True
        if time.monotonic() >= end:
            return False


def process_tree(pid):
    pids = [pid]
    for parent in pids:  # the list grows during the loop
        for path in glob.glob(f"/proc/{parent}/task/*/children"):
            try:
                with open(path) as children:
                    pids += map(int, children.read().split())
            except OSError:
                pass  # it has ended meanwhile
    return pids


def sample_memory(pid, memory):
    for process in process_tree(pid):
        try:
            with open(f"/proc/{process}/status") as status:
                fields = dict(line.split(":", 1) for line in status)
        except OSError:
            continue  # it has ended meanwhile
        if "VmHWM" not in fields:
            continue  # it has ended, but its parent has not collected it
        seen = memory.setdefault(process, ProcessMemory())
        seen.peak_resident = max(seen.peak_resident, int(fields["VmHWM"].split()[0]) * 1024)
        seen.peak_anonymous = max(seen.peak_anonymous, int(fields["RssAnon"].split()[0]) * 1024)


def own_cpu_seconds():
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def run(command, cores, patience_seconds, timeout_seconds):
    """Runs `command` on the caller's cores. After the time-out it kills the command and its children."""
    quiet = wait_until_quiet(cores, patience_seconds)
    memory = {}
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        busy, own, begin = busy_seconds(cores), own_cpu_seconds(), time.monotonic()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                                   start_new_session=True)
        try:
            while process.poll() is None and time.monotonic() - begin < timeout_seconds:
                sample_memory(process.pid, memory)
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                stderr.write(f"\nended after {timeout_seconds:g} seconds")
        seconds = time.monotonic() - begin
        foreign = (busy_seconds(cores) - busy) - (own_cpu_seconds() - own)
        stdout.seek(0), stderr.seek(0)
        return Outcome(process.returncode, stdout.read(), stderr.read(), memory,
                       max(0.0, foreign / seconds / len(cores)), quiet)
