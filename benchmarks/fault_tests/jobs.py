"""A run of several processes, as seen from outside. It starts in a session of its own and is watched through /proc. It ends when none of its processes is
left, no matter who started them."""
import os
import pathlib
import signal
import subprocess
import time
import uuid

MARK = "TWOBP_FAULT_TEST"


class Job:
    """Runs `command` with `environment` added to ours. Its output goes to two files in `folder`."""

    def __init__(self, command, folder, environment=None, limits=None):
        self.mark = f"{MARK}={uuid.uuid4().hex}"
        self.folder = pathlib.Path(folder)
        self.command = [str(part) for part in command]
        env = os.environ | (environment or {}) | dict([self.mark.split("=")])
        self.out, self.err = self.folder / "out.txt", self.folder / "err.txt"
        self.begin = time.monotonic()
        with open(self.out, "w") as out, open(self.err, "w") as err:
            self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env,
                                            start_new_session=True, preexec_fn=limits)

    def members(self):
        """Its living processes: those with its mark in their environment, and those of its session. Zombies do not count, because they do
        nothing and hold nothing."""
        found = []
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            try:
                status = pathlib.Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                if status[0] in "ZX":
                    continue
                environment = pathlib.Path("/proc", entry, "environ").read_bytes()
            except OSError:  # it has ended meanwhile
                continue
            if int(status[3]) == self.process.pid or self.mark.encode() in environment.split(b"\0"):
                found.append(int(entry))
        return found

    def ranks(self, program):
        """The process ids of the program's processes by rank. Processes that have not started far enough are missing."""
        found = {}
        for pid in self.members():
            try:
                if os.readlink(f"/proc/{pid}/exe") != str(program):
                    continue
                environment = pathlib.Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            rank = [v.partition(b"=")[2] for v in environment if v.startswith((b"OMPI_COMM_WORLD_RANK=", b"PMI_RANK="))]
            found[int(rank[0]) if rank else 0] = pid
        return found

    def ended(self):
        return self.process.poll() is not None

    def wait_gone(self, deadline, program=None, launcher_seconds=0):
        """Waits for the end of all processes and returns its time on the monotonic clock. It returns None if some are left at `deadline`. Those are
        killed, and `self.left` names them. With `launcher_seconds`, the launcher's processes may live that much longer than those of `program`, and
        the returned time is the end of the latter."""
        self.left = []
        gone = None
        while True:
            self.process.poll()
            members = self.members()
            if launcher_seconds and gone is None and not self.ranks(program):
                gone = time.monotonic()
                deadline += launcher_seconds
            if not members:
                self.process.wait()
                return gone or time.monotonic()
            if time.monotonic() > deadline:
                self.left = [f"{pid} {command_of(pid)}" for pid in members]
                self.kill()
                return None
            time.sleep(0.02)

    def kill(self):
        while members := self.members():
            for pid in members:
                send(pid, signal.SIGKILL)
            time.sleep(0.01)
        self.process.wait()

    def exit_code(self):
        """The exit code, or 128 + the signal that ended it, as in shells."""
        code = self.process.returncode
        return code if code is None or code >= 0 else 128 - code

    def seconds(self):
        return time.monotonic() - self.begin


def send(pid, number):
    try:
        os.kill(pid, number)
        return True
    except ProcessLookupError:
        return False


def command_of(pid):
    try:
        text = pathlib.Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        state = pathlib.Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]
        return f"({state}) {text[:80]}"
    except OSError:
        return "(gone)"
