"""Schedules from Python: the same as the program's, as data."""
import json
import os
import subprocess

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
    ours = twobp.schedule(name, stages=4, micro_batches=8, p2=p2).simulate(forward=[1, 2, 1, 1.5])
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
