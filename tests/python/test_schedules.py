"""Schedules from Python: the same as the program's, as data."""
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

import twobp


def test_every_name_makes_a_valid_schedule_that_simulates():
    assert "zb-v" in twobp.schedules()
    for name in twobp.schedules():
        one = twobp.schedule(name, ranks=2)
        one.validate()
        step = one.simulate()
        assert step.step > 0 and 0 <= step.bubble < 1
        busy = sum(op.end - op.begin for op in step.ranks[0])
        assert step.idle[0] == pytest.approx(1 - busy / step.step)


def test_instructions_are_data():
    ranks = twobp.schedule("1f1b", stages=2, micro_batches=2, p2="off").ranks
    assert [one for one in ranks[1] if not one.op.startswith(("SEND", "RECV"))] == [
        ("F", 1, 0, 1), ("B", 1, 0, 1), ("F", 1, 1, 1), ("B", 1, 1, 1)]


def test_slices_follow_each_other_and_go_back_in_reverse():
    one = twobp.schedule("1f1b", stages=2, micro_batches=1, p2="off", slices=2)
    assert (one.micro_batches, one.slices) == (1, 2) and "1 micro-batches of 2 slices" in repr(one)
    assert [one for one in one.ranks[1] if not one.op.startswith(("SEND", "RECV"))] == [
        ("F", 1, 0, 1), ("F", 1, 1, 1), ("B", 1, 1, 1), ("B", 1, 0, 1)]
    with pytest.raises(twobp.Error, match="no form with slices"):
        twobp.schedule("dualpipe-v", ranks=2, micro_batches=4, slices=2)


def test_the_paper_s_example_takes_9_units_without_2bp_and_7_with_it():
    off = twobp.schedule("1f1b", stages=2, micro_batches=2, p2="off").simulate()
    fill = twobp.schedule("1f1b", stages=2, micro_batches=2, p2="fill").simulate()
    assert (off.step, fill.step) == (9, 7)
    assert off.bubble == pytest.approx(3 / 9) and fill.bubble == pytest.approx(1 / 7)


@pytest.mark.skipif("TWOBP_PROGRAM" not in os.environ, reason="needs the program")
@pytest.mark.parametrize("name, p2", [("zb-v", "fill"), ("1f1b", "cooldown"), ("interleaved-zb", "placed")])
def test_the_program_says_the_same(tmp_path, name, p2):
    command = [os.environ["TWOBP_PROGRAM"], "plan", "--schedule", name, "--stages", "4", "--micro-batches", "8", "--p2", p2,
               "--forward", "1,2,1,1.5", "--json", "plan.json", "--svg", "plan.svg"]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    theirs = json.loads((tmp_path / "plan.json").read_text())["plans"][0]
    ours = twobp.schedule(name, stages=4, micro_batches=8, p2=p2).simulate(forward=[1, 2, 1, 1.5], cap=None)  # plan has no --cap by default
    assert ours.step == theirs["step_time"] and ours.bubble == theirs["bubble_ratio"]
    text = [[f"{one.stage}{one.op}{one.micro_batch}" for one in rank if one.count == 1] for rank in ours.schedule.ranks]
    assert text == [[one for one in rank["instructions"] if "-" not in one] for rank in theirs["ranks"]]


def test_csv_goes_both_ways(tmp_path):
    simulated = twobp.schedule("zb-v", ranks=2, micro_batches=4).simulate()
    simulated.to_csv(tmp_path / "mine.csv")
    again = twobp.Schedule.from_csv(tmp_path / "mine.csv")
    assert again.simulate().step == simulated.step
    assert again.to_csv() == simulated.to_csv()
    assert twobp.schedule(str(tmp_path / "mine.csv")).ranks == again.ranks


def test_a_picture_is_svg():
    one = twobp.schedule("1f1b", ranks=2)
    assert one.simulate().svg().startswith("<") and "</svg>" in one._repr_svg_()
    assert "rank 1" in one.simulate().grid()


@pytest.mark.parametrize("arguments, message", [
    ({"name": "1f1bb"}, '1f1b'), ({"name": "zb-v", "stages": 3}, "stages"), ({"name": "1f1b", "p2": "of"}, "off"),
    ({"name": "none.csv"}, "none.csv")])
def test_bad_arguments_are_one_clear_error(arguments, message):
    with pytest.raises(twobp.Error, match=message):
        twobp.schedule(**arguments)


def test_micro_batches_may_cost_unequally():
    schedule = twobp.schedule("1f1b", stages=2, micro_batches=3, p2="off")

    def step(*seconds):
        of_both_stages = [[one] for one in seconds]
        return schedule.simulate(of_both_stages, of_both_stages, 1).step

    assert [step(1, 3, 1), step(3, 1, 1), step(1), step(1, 1, 1)] == [17, 20, 12, 12]
    assert schedule.simulate([[1, 1], [3, 3], [1, 1]], [[1, 1], [3, 3], [1, 1]]).step == 17
    array = torch.tensor([[1.0], [3], [1]])
    assert schedule.simulate(array, array.numpy(), 1).step == 17


@pytest.mark.parametrize("costs", [
    {"forward": [1, 2, 3]}, {"forward": -1}, {"backward_p2": float("nan")}, {"forward": []}, {"forward": [[1], [1], [1]]},
    {"forward": [[1], [1, 2, 3]]}, {"forward": [[1], 3]}, {"forward": None}, {"forward": "dear"}, {"forward": [[1], [1]], "backward_p1": [[1]] * 4}])
def test_bad_costs_are_an_error(costs):
    with pytest.raises(twobp.Error):
        twobp.schedule("1f1b", stages=2).simulate(**costs)


def test_lists_of_actions_are_a_schedule():
    cells = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    mine = twobp.Schedule(cells)
    assert (mine.p2, mine.stages, mine.micro_batches, mine.rank_of_stage) == ("off", 2, 2, [0, 1])
    assert mine.simulate().step == twobp.schedule("1f1b", stages=2, micro_batches=2, p2="off").simulate().step
    assert twobp.Schedule(mine.ranks).ranks == mine.ranks  # instructions, with messages
    assert twobp.Schedule({1: cells[1], 0: [("F", 0, 0), ("F", 0, 1), None, ("B", 0, 0), ("B", 0, 1)]}).ranks == mine.ranks
    assert twobp.Schedule(cells, p2="fill").p2 == "fill"
    many = twobp.schedule("1f1b", stages=2, micro_batches=4, p2="end")  # a W over several micro-batches
    assert twobp.Schedule(many.ranks).simulate(cap=None).step == many.simulate(cap=None).step
    with pytest.raises(twobp.Error, match=r"row 2 \(rank 1\), column 2.*1Q0"):
        twobp.Schedule([["0F0", "0B0"], ["1F0", "1Q0"]])


def test_pytorch_s_actions_are_a_schedule():
    from torch.distributed.pipelining.schedules import _Action, _ComputationType as Kind
    mine = twobp.Schedule({0: [_Action(0, Kind.FORWARD, 0), None, _Action(0, Kind.FULL_BACKWARD, 0)], 1: [_Action(1, Kind.FORWARD, 0), _Action(
        1, Kind.BACKWARD_INPUT, 0), _Action(1, Kind.BACKWARD_WEIGHT, 0)]})
    assert mine.p2 == "placed" and [one.op for one in mine.ranks[1] if len(one.op) == 1] == ["F", "I", "W"]


@pytest.mark.parametrize("ranks", ["0F0,0B0", [], ["0F0", "0B0"], 3, [["0F0,0B0"]], [["0F0\n1F0"]], [[]], [[("F", 0)]], {1: ["0F0", "0B0"]}, [[3]]])
def test_lists_that_are_no_schedule_are_an_error(ranks):
    with pytest.raises(twobp.Error):
        twobp.Schedule(ranks)


def test_a_csv_runs_as_it_was_written():
    off = twobp.schedule("1f1b", ranks=2, micro_batches=4, p2="off")
    again = twobp.Schedule.from_csv(off.to_csv())  # a text
    assert again.p2 == "off" and again.ranks == off.ranks and again.simulate().step == off.simulate().step
    assert twobp.Schedule.from_csv(off.to_csv(), p2="fill").simulate().step == twobp.schedule("1f1b", ranks=2, micro_batches=4, p2="fill").simulate().step
    placed = twobp.schedule("zb-h1", ranks=2, micro_batches=4, p2="placed")
    assert twobp.Schedule.from_csv(placed.to_csv()).p2 == "placed"
    with pytest.raises(twobp.Error, match="gone.csv"):
        twobp.Schedule.from_csv("gone.csv")


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-v"])
def test_by_default_a_rank_holds_no_more_than_without_2bp(name):
    made = {p2: twobp.schedule(name, ranks=8, micro_batches=16, p2=p2) for p2 in ("off", "fill")}
    off = made["off"].simulate()
    fill = made["fill"].simulate()
    assert fill.peak == off.peak and fill.step < off.step
    if name == "1f1b":
        assert (fill.peak, made["fill"].simulate(cap=None).peak) == (8, 16)
    assert made["fill"].simulate(cap=off.peak).step == fill.step


def test_too_few_layers_for_zb_v_name_a_schedule_that_fits():
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    batch = {"input": torch.randn(2, 4), "wanted": torch.randn(2, 1)}
    arguments = {"loss_fn": lambda out, batch: torch.nn.functional.mse_loss(out, batch["wanted"]), "micro_batches": 2}
    with pytest.raises(twobp.Error, match="layers, too few for 8 stages .pipeline.stages.: use a schedule with one stage on each of 4 ranks|use at most . ranks"):
        twobp.Trainer(module, batch, ranks=4, schedule="zb-v", **arguments)
    with pytest.raises(twobp.Error, match="one stage on each of 2 ranks .pipeline.schedule 1f1b or zb-h1"):
        twobp.Trainer(module, batch, ranks=2, schedule="zb-v", **arguments)
    assert twobp.Trainer(module, batch, ranks=2, schedule="zb-h1", **arguments).ranks == 2


ROOT = pathlib.Path(__file__).resolve().parents[2]


def run_in_root(code, **environment):
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**kept, **environment}, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_root_s_folder_of_sources_is_not_taken_for_the_package():
    none = run_in_root("import sys; sys.path[1:] = [one for one in sys.path[1:] if 'site-packages' not in one]; import twobp")
    assert none.returncode == 1 and "ModuleNotFoundError" in none.stderr and "pip install" in none.stderr
    found = run_in_root("import twobp, twobp.transformers; print(twobp.__file__, twobp.schedules()[0])", PYTHONPATH=os.environ["PYTHONPATH"])
    assert found.returncode == 0, found.stderr
    assert pathlib.Path(found.stdout.split()[0]).resolve().parent == pathlib.Path(twobp.__file__).resolve().parent
