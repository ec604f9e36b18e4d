#!/usr/bin/env python3
"""Does a test notice when the product forgets one of its waits between streams, frees memory too early, or makes the
host wait?

Removes one line at a time, builds the device tests and runs them on the stand-in device
(tests/nn/device/stand_in_device.h), which runs operators late. Prints, for each line, a row of the table in
tests/mutants.md: what is left out, and the first test that fails. Exits with 1 if a line can be removed and no test
fails.

  scripts/mutate_waits.py [--build build/release] [WORD ...]    only the rows whose text or line has one of these words
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# (what it does, file, the line that is left out, what stands in its place)
DEVICE = "twobp/nn/device/device.cpp"
GRAPH = "twobp/pipeline/executor/step_graph.cpp"
STEP = "twobp/pipeline/executor/rank_executor.cpp"
THREADS = "twobp/transport/threads/in_process.cpp"
SUMS = "twobp/pipeline/gradient_reducer.cpp"
NCCL = "twobp/transport/nccl/nccl.cpp"
LINK = "twobp/transport/nccl/nccl_link.cpp"
GROUP = "twobp/transport/nccl/nccl_communicator.cpp"
GPUS = "twobp/transport/nccl/gpu_world.cpp"
LINES = [
    ("what another rank on the GPU sent is marked as used", DEVICE, "user.uses(value);  // belongs to another rank on this GPU", ""),
    ("a copy from another GPU waits for its tensor", DEVICE, "copies.here.wait(ready);", ""),
    ("a withheld sum holds no copies for computations up", DEVICE, "*user == *sums_ ? *to_sum_ : *to_compute_;", "*to_compute_;"),
    ("what is copied to another GPU is marked as used", DEVICE, "source.uses(value);", ""),
    ("the user waits for the sender on its GPU", DEVICE, "user.wait(copied ? copies.here.record() : ready);",
     "user.wait(copied ? copies.here.record() : DeviceEvent());"),
    ("the user waits for a copy from another GPU", DEVICE, "user.wait(copied ? copies.here.record() : ready);",
     "user.wait(copied ? DeviceEvent() : ready);"),
    ("a graph waits for its inputs on other GPUs", GRAPH, "first.wait(inputs.device.compute().record());", ""),
    ("a recorded rank waits for the beginning", STEP, "parts_.device.compute().wait(begin);", "(void)begin;"),
    ("the end of a recording waits for all ranks", GRAPH, "for (const DeviceEvent& end : ends) first.wait(end);", ""),
    ("the update waits for the graph", STEP, "parts_.device.compute().wait(end);", "(void)end;"),
    ("a message between threads waits for its sender's work", THREADS, "device_.current().record()});", "DeviceEvent()});"),
    ("a sum waits for W", SUMS, "!made_.empty() && made_.front().passed()", "!made_.empty()"),
    ("the update waits for sums", SUMS, "device_.compute().wait(device_.sums().record());", ""),
    ("NCCL: a send waits for its tensors", NCCL, "peer.queued.push_back({std::move(message), tag, device_.current().record()});",
     "peer.queued.push_back({std::move(message), tag, {}});"),
    ("NCCL: a message to itself waits for its tensors", NCCL,
     "mailbox_.put({to, tag, std::move(values), device_.current().record()});", "mailbox_.put({to, tag, std::move(values), DeviceEvent()});"),
    ("NCCL: a tensor by the host is used when it is on the device", NCCL, "done = device_.current().record();", ""),
    ("NCCL: the user waits for what it receives", NCCL, "user.wait(message.ready);", ""),
    ("NCCL: what was received is marked as used", NCCL, "user.uses(value);", "(void)value;"),
    ("NCCL: received memory belongs to the link's stream", NCCL, "const OnStream there(peer.receive->stream());", ""),
    ("NCCL: what is sent is kept", LINK, "launched(std::move(values), begin, tag);", "launched({}, begin, tag);"),
    ("NCCL: its own sums wait for their tensors", GROUP, "stream().wait(ready);", "(void)ready;"),
    ("operators are loaded before transfers", GPUS, 'set_cuda_variable("CUDA_MODULE_LOADING", "EAGER",', '(void)std::tuple("", "",'),
    ("kernels are launched before transfers", "twobp/train/trainer.cpp", "launch_all_kernels(parts.model, measured, *parts.world);", ""),
    ("inputs are copied from pinned memory", "twobp/nn/layer.cpp", "tensor.is_cpu() ? pinned(tensor, device.type()) : tensor;", "tensor;"),
    ("workspaces of libraries come before the layers", "twobp/pipeline/pipeline.cpp", "world_.device(rank).prepare_libraries();", ""),
]
TESTS = ["tests/train/train_on_device_test", "tests/train/train_device_test", "tests/nn/nn_test", "tests/program/device_command_test",
         "tests/transport/device_transport_test", "tests/nn/device_test"]
TARGETS = [pathlib.Path(test).name for test in TESTS]


def run(command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def first_failure(build):
    built = run(["cmake", "--build", build, "--target", *TARGETS])
    if built.returncode != 0:
        sys.exit(f"the build fails:\n{built.stdout[-3000:]}{built.stderr[-2000:]}")
    for test in TESTS:
        for seed in map(str, range(1, 4)):
            try:
                done = subprocess.run([f"{build}/{test}", "--gtest_fail_fast"], cwd=ROOT, capture_output=True, text=True,
                                      timeout=600, env={**os.environ, "TWOBP_STAND_IN_SEED": seed})
            except subprocess.TimeoutExpired:
                return f"{test} does not end"
            if done.returncode != 0:
                failed = re.findall(r"\[  FAILED  \] ([^\s,]+)", done.stdout) or re.findall(r"\[ RUN      \] (\S+)", done.stdout)[-1:]
                return re.sub(r"^\w+/(?=\w+\.)", "", failed[0]) if failed else test  # without the name of the instantiation
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/release")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    failure = first_failure(options.build)
    if failure:
        sys.exit(f"{failure} fails even without a mutant")
    unnoticed = 0
    for what, name, line, instead in LINES:
        if options.words and not any(word in what + name + line for word in options.words):
            continue
        path = ROOT / name
        text = path.read_text()
        if text.count(line) != 1:
            sys.exit(f"{name} has {text.count(line)} times the line: {line}")
        try:
            path.write_text(text.replace(line, instead))
            failure = first_failure(options.build)
        finally:
            path.write_text(text)
        unnoticed += failure is None
        print(f"| {what} | {f'`{failure}`' if failure else f'NO TEST FAILS without this in {name}: {line}'} |", flush=True)
    run(["cmake", "--build", options.build, "--target", *TARGETS])
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
