#!/usr/bin/env python3
"""Emulates two hosts on this machine by network namespaces, connected by a link with a delay, a bandwidth and a loss,
and runs mpirun across it. It needs root and /dev/net/tun. Any kernel is suitable, because this process itself delays
the packets. It does not use the kernel's netem.

    scripts/two_hosts.py --delay-ms 2 --mbit 200 --loss 0.001 -- -n 2 build/release/twobp train config.json
    scripts/two_hosts.py --cut-after 5 -- -n 2 ...      the link is cut after 5 s

The arguments after -- go to mpirun. Its processes are placed on the two hosts alternately.
"""
import argparse
import collections
import fcntl
import heapq
import os
import random
import select
import shlex
import struct
import subprocess
import sys
import tempfile
import threading
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 9000
SUBNET = "10.77.0"
QUEUE_SECONDS = 0.25  # a packet that would wait longer is dropped, as in a switch


def missing(tools=("ip", "unshare", "mpirun")):
    """The reason why two hosts are impossible here, or None."""
    if os.geteuid() != 0:
        return "two hosts need root"
    if not os.path.exists("/dev/net/tun"):
        return "two hosts need /dev/net/tun"
    for tool in tools:
        if subprocess.run(["which", tool], capture_output=True).returncode != 0:
            return f"two hosts need '{tool}' (packages iproute2, util-linux, openmpi-bin)"
    return None


def ip(*arguments, host=None):
    inside = ["ip", "netns", "exec", host] if host else []
    subprocess.run([*inside, "ip", *arguments], check=True, capture_output=True)


class Link(threading.Thread):
    """Passes packets between two interfaces. A packet waits until the previous ones have been sent at `mbit`. It
    arrives `delay` seconds later, or is lost with the probability `loss`."""

    def __init__(self, ends, delay, mbit, loss, seed):
        super().__init__(daemon=True)
        self.ends, self.delay, self.seconds_a_byte, self.loss = ends, delay, 8e-6 / mbit if mbit else 0, loss
        self.random = random.Random(seed)
        self.free_at = [0.0, 0.0]  # by direction: when the last packet will have been sent
        self.under_way = []        # (arrival time, number, direction, packet)
        self.number = 0
        self.up = True
        self.ended = False
        self.counts = collections.Counter()

    def take(self, direction):
        try:
            packet = os.read(self.ends[direction], 65536)
        except BlockingIOError:
            return False
        now = time.monotonic()
        begin = max(now, self.free_at[direction])
        self.counts["packets"] += 1
        self.counts["bytes"] += len(packet)
        if not self.up or begin - now > QUEUE_SECONDS or self.random.random() < self.loss:
            self.counts["dropped"] += 1
            return True
        self.free_at[direction] = begin + len(packet) * self.seconds_a_byte
        self.number += 1
        heapq.heappush(self.under_way, (self.free_at[direction] + self.delay, self.number, 1 - direction, packet))
        return True

    def run(self):
        # This thread has priority over other processes, because a late thread would change the link.
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        for end in self.ends:
            os.set_blocking(end, False)
        while not self.ended:
            wait = max(0.0, self.under_way[0][0] - time.monotonic()) if self.under_way else 0.05
            # Unlike poll(), this does not count in milliseconds. Waking for each packet once takes little of the core.
            for end in select.select(self.ends, [], [], wait)[0]:
                while self.take(self.ends.index(end)):
                    pass
            now = time.monotonic()
            while self.under_way and self.under_way[0][0] <= now:
                _, _, to, packet = heapq.heappop(self.under_way)
                try:
                    os.write(self.ends[to], packet)
                except OSError:  # the host is gone, or its queue is full
                    self.counts["dropped"] += 1


class TwoHosts:
    """A context manager that creates and removes the hosts."""

    def __init__(self, delay=0.0, mbit=0.0, loss=0.0, seed=1):
        self.shape = (delay, mbit, loss, seed)
        self.names = [f"twobp{os.getpid()}{letter}" for letter in "ab"]
        self.devices = [f"tw{os.getpid()}{letter}" for letter in "ab"]
        self.ends = []

    def __enter__(self):
        try:
            for name in self.names:
                ip("netns", "add", name)
            self.add_devices()
            for number, (name, device) in enumerate(zip(self.names, self.devices)):
                ip("link", "set", device, "netns", name)
                ip("link", "set", "lo", "up", host=name)
                ip("link", "set", device, "mtu", str(MTU), "txqueuelen", "1000", host=name)
                ip("addr", "add", f"{SUBNET}.{number + 1}", "peer", f"{SUBNET}.{2 - number}", "dev", device, host=name)
                ip("link", "set", device, "up", host=name)
                # TCP gives up a silent peer after seconds instead of a quarter of an hour. mpirun itself waits until
                # then for its other half.
                subprocess.run(["ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_retries2=3"], check=True)
            self.shape_link()
            self.folder = tempfile.TemporaryDirectory(prefix="twobp-hosts-")
            self.agent = os.path.join(self.folder.name, "on_host")
            with open(self.agent, "w") as script:
                script.write('#!/bin/sh\nhost=$1; shift\n'
                             'exec ip netns exec "$host" unshare --uts sh -c "hostname $host; $*"\n')
            os.chmod(self.agent, 0o755)
        except BaseException:
            self.__exit__()
            raise
        return self

    def add_devices(self):
        for device in self.devices:
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
            fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN | IFF_NO_PI))
            self.ends.append(end)

    def shape_link(self):
        self.link = Link(self.ends, *self.shape)
        self.link.start()

    def __exit__(self, *_):
        if hasattr(self, "link"):
            self.link.ended = True
            self.link.join()
        for end in self.ends:
            os.close(end)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def mpirun(self):
        """The command that replaces `mpirun`. It runs on the first host."""
        interfaces = f"{SUBNET}.0/24"
        flags = ["--allow-run-as-root", "--oversubscribe", "--mca", "plm_rsh_agent", self.agent,
                 "--host", f"{self.names[0]}:64,{self.names[1]}:64", "--map-by", "node", "--bind-to", "none",
                 "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", interfaces,
                 "--mca", "oob_tcp_if_include", interfaces]
        command = " ".join(map(shlex.quote, ["mpirun", *flags]))
        name = self.names[0]
        return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c",
                f'hostname {name}; exec {command} "$@"', "mpirun"]

    def cut(self):
        self.link.up = False

    def mend(self):
        self.link.up = True


class HostsOfOneKernel(TwoHosts):
    """The kernel itself passes the packets, at the bandwidth of its token bucket filter, so that the link takes no
    processor time. It has no delay and loses nothing."""

    def add_devices(self):
        ip("link", "add", self.devices[0], "type", "veth", "peer", "name", self.devices[1])

    def shape_link(self):
        _, mbit, _, _ = self.shape
        for name, device in zip(self.names, self.devices) if mbit else ():
            subprocess.run(["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate",
                            f"{mbit}mbit", "burst", "1mb", "latency", "200ms"], check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay-ms", type=float, default=0, help="one-way delay of a packet")
    parser.add_argument("--mbit", type=float, default=0, help="megabits per second in each direction; 0: no limit")
    parser.add_argument("--loss", type=float, default=0, help="probability that a packet is lost, 0 to 1")
    parser.add_argument("--seed", type=int, default=1, help="seed of the losses")
    parser.add_argument("--cut-after", type=float, help="seconds until the link is cut")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the arguments of mpirun")
    options = parser.parse_args()
    why_not = missing()
    if why_not:
        print(f"skipped: {why_not}")
        sys.exit(77)
    arguments = options.command[1:] if options.command[:1] == ["--"] else options.command
    with TwoHosts(options.delay_ms / 1e3, options.mbit, options.loss, options.seed) as hosts:
        process = subprocess.Popen([*hosts.mpirun(), *arguments])
        if options.cut_after is not None:
            try:
                process.wait(options.cut_after)
            except subprocess.TimeoutExpired:
                hosts.cut()
        code = process.wait()
        print(f"link: {dict(hosts.link.counts)}", file=sys.stderr)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
