#!/usr/bin/env python3
"""Training on two hosts with a slow link between them. Whatever delays and losses the link causes, weights and losses
equal those of one process bit for bit. If the link is cut, the ranks of both hosts end after the time-out."""
import pathlib
import random
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "scripts"), str(ROOT / "benchmarks/fault_tests")]

import kinds
import rounds
import two_hosts

PROGRAM = pathlib.Path(sys.argv.pop(1)).resolve()


class Training(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="twobp-network-")
        cls.reference = rounds.Reference(cls.folder.name, PROGRAM, random.Random(1))

    def run_on(self, hosts, name, timeout, processes=2):
        run = rounds.Run(pathlib.Path(self.folder.name) / name, timeout, random.Random(name))
        return run, run.start([*hosts.mpirun(), "-n", str(processes)], PROGRAM)

    def test_has_the_bits_of_one_process(self):
        for delay, mbit, loss in [(0, 0, 0), (1e-3, 200, 0), (1e-3, 100, 0.01)]:
            with self.subTest(delay=delay, mbit=mbit, loss=loss), two_hosts.TwoHosts(delay, mbit, loss) as hosts:
                run, job = self.run_on(hosts, f"{mbit} {loss}", 60)
                self.assertIsNotNone(job.wait_gone(job.begin + 200), job.left)
                self.assertEqual(job.exit_code(), 0, job.err.read_text())
                self.assertEqual(self.reference.problems_at_end(run), [])
                counts = hosts.link.counts
                self.assertGreater(counts["bytes"], 1e6, "messages did not go over the link")
                self.assertEqual(counts["dropped"] > 0, loss > 0, counts)

    def test_a_cut_link_ends_both_hosts(self):
        with two_hosts.TwoHosts(1e-3, 1000) as hosts:
            run, job = self.run_on(hosts, "cut", kinds.SHORT)
            while len(rounds.losses_in(run.metrics)) < 20 and not job.ended():
                time.sleep(0.01)
            self.assertEqual(len(job.ranks(PROGRAM)), 2)
            hosts.cut()
            cut = time.monotonic()
            gone = job.wait_gone(cut + kinds.SHORT + kinds.GRACE, PROGRAM, 30)
            self.assertIsNotNone(gone, job.left)
            self.assertNotEqual(job.exit_code(), 0)
            for error in (errors := kinds.errors_of(argument(job))):
                self.assertIn("pipeline.timeout", error)
            self.assertIn(len(errors), (1, 2), job.err.read_text())


def argument(job):
    """The object that errors_of inspects."""
    return type("Trial", (), {"job": job})


if __name__ == "__main__":
    if two_hosts.missing():
        print(f"skipped: {two_hosts.missing()}")
        sys.exit(77)
    unittest.main(verbosity=2)
