"""The planner's table from Python."""
import pytest
import torch

import twobp


def test_a_trainer_is_planned(make):
    plan = twobp.plan(make(), ranks=range(1, 4), micro_batches=[4, 8], seconds=0.05)
    assert 1 <= len(plan) <= 10 and plan.gain.startswith("2BP")
    speeds = [row.samples_per_second for row in plan]
    assert speeds[1:] == sorted(speeds[1:], reverse=True)
    for row in plan:
        assert row.ranks in (1, 2, 3) and row.micro_batches in (4, 8) and row.micro_batch_size == 2
        assert sum(row.split) == 6 and len(row.split) == row.stages
        assert row.samples_per_second == pytest.approx(2 * row.micro_batches / row.step_seconds)
    assert plan[0].schedule in repr(plan) and "<table>" in plan._repr_html_()


def test_a_row_trains(make, vectors):
    row = twobp.plan(make(), ranks=2, micro_batches=4, schedule="zb-v", p2="fill", seconds=0.05)[0]
    trainer = make(schedule=row.schedule, p2=row.p2, ranks=row.ranks, split=row.split)
    assert trainer.split == row.split
    assert trainer.step(vectors).loss == make().step(vectors).loss


def test_recomputation_is_measured_on_request(make):
    plan = twobp.plan(make(), recompute=["none", "both"], top=None, seconds=0.05)
    assert {row.recompute for row in plan} == {"none", "both"}


def test_a_plan_becomes_a_table_of_pandas(make):
    pandas = pytest.importorskip("pandas")
    plan = twobp.plan(make(), seconds=0.05)
    table = plan.to_pandas()
    assert isinstance(table, pandas.DataFrame) and list(table["schedule"]) == [row.schedule for row in plan]


@pytest.mark.parametrize("arguments, message", [
    ({"memory": "1KiB"}, "smallest memory"), ({"memory": "much"}, "80GiB"), ({"schedule": "1f1bb"}, "1f1b"), ({"ranks": 100}, "layers"),
    ({"recompute": "all"}, "all")])
def test_what_cannot_be_planned_is_one_clear_error(make, arguments, message):
    with pytest.raises(twobp.Error, match=message):
        twobp.plan(make(), seconds=0.05, **arguments)


def test_a_file_of_costs_needs_ranks(tmp_path):
    with pytest.raises(twobp.Error, match="costs.json"):
        twobp.plan(tmp_path / "costs.json", ranks=2)


class Tower(torch.nn.Sequential):
    def forward(self, x, y):
        return torch.nn.functional.mse_loss(super().forward(x), y)


def test_a_bundle_is_planned(tmp_path):
    trainer = twobp.Trainer(Tower(*(torch.nn.Linear(8, 8) for _ in range(4))).train(), {"x": torch.randn(3, 8), "y": torch.randn(3, 8)}, ranks=1)
    trainer.save(tmp_path / "bundle")
    plan = twobp.plan(tmp_path / "bundle", ranks=[1, 2], micro_batches=4, seconds=0.05)
    assert {row.ranks for row in plan} <= {1, 2} and all(sum(row.split) == len(trainer.layers) and row.micro_batch_size == 3 for row in plan)
    (tmp_path / "bundle" / "graph.json").write_text("{}")
    with pytest.raises(twobp.Error, match="graph.json is damaged"):
        twobp.plan(tmp_path / "bundle", ranks=2)


@pytest.mark.parametrize("of, ranks, message", [(None, 2, "of is a NoneType"), (".", 2, "no graph.json"), ("costs.json", "2", "ranks is '2'"), ("costs.json", None, "give ranks"),
                                                ("costs.json", [1.5], "ranks is 1.5")])
def test_what_is_no_model_or_number(of, ranks, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(twobp.Error, match=message):
        twobp.plan(of, ranks=ranks)


@pytest.fixture
def sequences():
    ids = torch.arange(64).reshape(1, 64) % 32
    return {"input_ids": ids, "labels": ids}


@pytest.fixture
def decode(sequences):
    """Makes a trainer of a small decoder, with one sequence of 64 positions a step."""
    def decode(**settings):
        model = {"type": "llama", "dim": 16, "layers": 2, "heads": 2, "hidden": 24, "vocab": 32}
        return twobp.Trainer(model=model, example=sequences, ranks=2, micro_batches=1, seed=3, **settings)
    return decode


def test_slices_are_planned_and_train(decode, sequences):
    plan = twobp.plan(decode(), micro_batches=1, slices=[1, 2, 4], top=None, seconds=0.05)
    assert {row.slices for row in plan} == {1, 2, 4} and "slices" in repr(plan)
    for row in plan:
        assert len(row.slice_lengths) == (row.slices if row.slices > 1 else 0) and sum(row.slice_lengths) in (0, 64)
    row = next(row for row in plan if row.slices == 4)
    sliced = decode(schedule=row.schedule, p2=row.p2, stages=row.stages, split=row.split, slices=4, slice_lengths=row.slice_lengths)
    assert sliced.step(sequences).loss == pytest.approx(decode().step(sequences).loss, rel=1e-5)
    configured = twobp.plan(sliced, micro_batches=1, top=None, seconds=0.05)
    assert {row.slices for row in configured} == {1, 4}


def test_a_searched_schedule_has_slices(decode, sequences):
    searched = decode(schedule="auto", slices=2, slice_lengths=[40, 24])
    assert searched.step(sequences).loss == decode(schedule="gpipe", p2="off", slices=2, slice_lengths=[40, 24]).step(sequences).loss


@pytest.mark.parametrize("slices, message", [(9, "at most 8 slices"), (0, "at least 1"), ([2, -1], "at least 1")])
def test_a_sequence_cannot_be_cut_into_any_number_of_slices(decode, slices, message):
    with pytest.raises(twobp.Error, match=message):
        twobp.plan(decode(), slices=slices, seconds=0.05)
