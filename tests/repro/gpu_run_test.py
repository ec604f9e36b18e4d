"""Tests scripts/gpu/run without a GPU: a short rehearsal with the stand-in device, and what becomes of a step that fails, is too slow,
has passed before, or cannot run.

    TWOBP_BUILD=build/release python tests/repro/gpu_run_test.py
"""
import argparse
import contextlib
import importlib.machinery
import importlib.util
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
if importlib.util.find_spec("torch") is None:
    print(f"skipped: {sys.executable} has no torch")
    sys.exit(77)
BUILD = pathlib.Path(os.environ["TWOBP_BUILD"])
sys.path.append(str(ROOT / "scripts"))

import two_hosts


def load_script():
    loader = importlib.machinery.SourceFileLoader("gpu_run", str(ROOT / "scripts/gpu/run"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_run", loader))
    loader.exec_module(module)
    return module


script = load_script()


class Run(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def run_script(self, *arguments, commit="one"):
        """The exit code, the text, and results.json."""
        with mock.patch.dict(os.environ, TWOBP_COMMIT=commit), contextlib.redirect_stdout(io.StringIO()) as text:
            code = script.main([*arguments, "--no-build", "--build", str(BUILD), "--out", str(self.folder / "out")])
        return code, text.getvalue(), json.loads((self.folder / "out/results.json").read_text())


class Steps(Run):
    """Steps that stand in for those of the script."""

    def run_step(self, *step, commit="one", rehearse=True):
        with mock.patch.object(script, "steps_of", lambda part, given: [("step", *step)]):
            code, text, results = self.run_script("graphs", *(["--rehearse"] if rehearse else []), commit=commit)
        return code, text, results["step"]

    def runs(self):
        return (self.folder / "runs").read_text().count("\n")

    def counted(self, then="true"):
        return ["sh", "-c", f"echo >> {self.folder}/runs; {then}"], 60, None

    def test_what_has_passed_is_left_out_at_the_same_commit(self):
        for commit, runs in (("one", 1), ("one", 1), ("two", 2), ("two", 2), ("one", 3)):
            code, _, state = self.run_step(*self.counted(), commit=commit)
            self.assertEqual((code, state["state"], state["commit"], self.runs()), (0, "passed", commit, runs))

    def test_a_rehearsal_is_no_run(self):
        self.run_step(*self.counted())
        self.run_step(*self.counted(), rehearse=False)
        self.assertEqual(self.runs(), 2)

    def test_a_step_that_fails_fails_the_run_and_runs_again(self):
        for runs in (1, 2):
            code, text, state = self.run_step(*self.counted("exit 3"))
            self.assertEqual((code, state["state"], state["code"], self.runs()), (1, "failed", 3, runs))
            self.assertIn("step: failed", text)

    def test_a_step_over_its_limit_is_too_slow(self):
        code, text, state = self.run_step(["sleep", "600"], 0.2, None)
        self.assertEqual((code, state["state"]), (1, "too slow"))
        self.assertLess(state["seconds"], 60)
        self.assertIn("step: too slow", text)

    def test_tests_that_do_not_run_have_not_passed(self):
        for printed, rehearse, passes in (("[==========] 0 tests from 0 test suites ran. (0 ms total)", True, False),
                                          ("[==========] 10 tests from 1 test suite ran.\n[  PASSED  ] 10 tests.", False, True),
                                          ("[==========] 3 tests from 1 test suite ran.\n[  PASSED  ] 0 tests.", True, True),
                                          ("[==========] 3 tests from 1 test suite ran.\n[  PASSED  ] 0 tests.", False, False)):
            with self.subTest(printed, rehearse=rehearse):
                code, _, state = self.run_step(["printf", "%s", printed], 60, None, commit=printed, rehearse=rehearse)
                self.assertEqual((code, state["state"]), (0, "passed") if passes else (1, "failed"))

    def test_only_a_rehearsal_may_lack_the_sanitizer(self):
        for reason, rehearse, code in ((script.NO_SANITIZER, True, 0), (script.NO_SANITIZER, False, 1), ("there is no program", True, 1)):
            with self.subTest(reason, rehearse=rehearse):
                result, text, state = self.run_step(["true"], 60, reason, rehearse=rehearse)
                self.assertEqual((result, state["state"]), (code, "left out"))
                self.assertIn(f"step: left out: {reason}", text)

    def test_a_commit_names_the_files_that_differ(self):
        def git(*arguments):
            subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments], cwd=self.folder, check=True, capture_output=True)

        names = []
        with mock.patch.object(script, "ROOT", self.folder), mock.patch.dict(os.environ):
            os.environ.pop("TWOBP_COMMIT", None)
            given = argparse.Namespace(pack=self.folder / "pack")
            git("init")
            for text in ("a", "b", "c"):
                (self.folder / "file").write_text(text)
                if text == "a":
                    git("add", "file")
                    git("commit", "-m", "a")
                names.append(script.commit_of(given))
            self.assertEqual(len(set(names)), 3, names)
            self.assertEqual(script.commit_of(given), names[-1])


class Rehearsal(Run):
    # A few tests of each program: all of them run in tests of their own.
    SHORT = {"device_test": "Device.*", "pipeline_on_device_test": "DeviceTimes.*", "device_transport_test": "Nccl.MakesAWorld",
             "train_on_device_test": "OnDeviceTest.ReadsOnce*", "train_device_test": "*HaveTheBitsOfThreads/Two",
             "nn_test": "*GivesTheSameOnADevice/Scan*"}

    def rows(self, part):
        result = json.loads((self.folder / "out" / part / "results.json").read_text())
        self.assertEqual(result["not_measured"], [])
        return [(row["key"], row["figures"]) for row in result["rows"]]

    def test_every_part(self):
        short = [(program, self.SHORT[pathlib.Path(program).name]) for program, _ in script.PROGRAMS]
        with mock.patch.object(script, "PROGRAMS", short), mock.patch.object(script.shutil, "which", lambda name: None):
            code, text, results = self.run_script("all", "--rehearse")
        logs = {name: (self.folder / "out" / state["log"]).read_text()[-2000:] for name, state in results.items()
                if state["state"] == "failed"}
        self.assertEqual(code, 0, f"{text}\n{logs}")
        self.assertEqual({name for name, state in results.items() if state["state"] == "left out"}, set(script.SANITIZED))
        self.assertEqual({name for name, state in results.items() if state["state"] == "passed"},
                         set(self.SHORT) | set(script.MEASURES))
        graphs = self.rows("graphs")
        self.assertEqual([key["w"] for key, _ in graphs], ["serial", "stream", "layer_streams", "graph"])
        for key, figures in graphs:
            self.assertEqual((key["device"], figures["same_bits"]), (script.STAND_IN, 1), key)
        one_gpu = [key for key, _ in self.rows("one_gpu")]
        self.assertEqual({(key["ranks"], key["launch"]) for key in one_gpu},
                         {(4, "one by one"), (4, "graph"), (1, "one by one"), (1, "graph")})
        self.assertIn("gpu_parts=true", (self.folder / "out/one_gpu.log").read_text())

    def test_several_gpus(self):
        code, text, results = self.run_script("several", "--rehearse")
        self.assertEqual(code, 0, text + "".join(log.read_text()[-1000:] for log in (self.folder / "out").glob("*.log")))
        parts = {f"several_{name}": name for name in script.SEVERAL}
        lacks = {"memory", "hop", *(["cut"] if two_hosts.missing(tools=("ip", "unshare")) else [])}
        self.assertEqual({parts[name] for name, state in results.items() if state["state"] == "left out"}, lacks)
        self.assertEqual({parts[name] for name, state in results.items() if state["state"] == "passed"}, set(script.SEVERAL) - lacks)

    def test_filters_select_tests(self):
        for program, tests in [*script.PROGRAMS, *script.SANITIZED.values()]:
            for part in tests.split(":"):
                with self.subTest(program, tests=part):
                    listed = subprocess.run([BUILD / program, "--gtest_list_tests", f"--gtest_filter={part}"], check=True,
                                            capture_output=True, text=True).stdout
                    self.assertIn("\n  ", listed)

    def test_programs_are_built(self):
        """The targets that --rehearse builds are those of this build."""
        with mock.patch.object(script, "configure", lambda given: []):
            build, = [command for name, command, _, _ in script.steps_of("build", argparse.Namespace(build=BUILD, rehearse=True)) if name == "build"]
        targets = build[build.index("--target") + 1:]
        subprocess.run(["cmake", "--build", BUILD, "--target", *targets, "--", "-n"], check=True, capture_output=True)


if __name__ == "__main__":
    unittest.main()
