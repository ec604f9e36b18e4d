"""One run of twobp for compare.py with one process per stage, over MPI. It writes the same file as `twobp bench`."""
import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--twobp", type=pathlib.Path, required=True)
    parser.add_argument("--config", type=pathlib.Path, required=True)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        metrics = pathlib.Path(folder, "metrics.jsonl")
        settings = [*args.set, f"train.steps={args.warmup + args.steps}", "data.held_out=0", "pipeline.transport=mpi"]
        command = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "--oversubscribe", "-n", "2", args.twobp, "train",
                   args.config, "--metrics", metrics]
        for setting in settings:
            command += ["--set", setting]
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
        steps = [json.loads(line) for line in metrics.read_text().splitlines()][args.warmup:]
    seconds = [step["step_seconds"] for step in steps]
    idle = [statistics.median(column) for column in zip(*(step["idle_fraction"] for step in steps))]
    row = {"step_seconds": statistics.median(seconds), "step_seconds_all": seconds, "idle_fraction": idle}
    args.json.write_text(json.dumps({"rows": [row]}))


if __name__ == "__main__":
    main()
