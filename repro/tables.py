"""Code that `page` and the modules that write its parts share: kept results, their figures, and Markdown tables."""
import json
import pathlib

from experiment import median

FOLDER = pathlib.Path(__file__).resolve().parent


def results_of(name):
    path = FOLDER / name / "results.json"
    return json.loads(path.read_text()) if path.exists() else None


def results_elsewhere(name):
    """Results of other machines, which were copied into that folder by hand."""
    return [json.loads(path.read_text()) for path in sorted((FOLDER / name).glob("elsewhere/*.json"))]


def results_on_gpus(name):
    """Results of `run --gpus`."""
    return [json.loads(path.read_text()) for path in (FOLDER / name).glob("gpus/results.json")]


def select(result, **key):
    return [row for row in result["rows"] if all(row["key"].get(k) == v for k, v in key.items())]


def figures(result, **key):
    """The figures of the only row with this key."""
    row, = select(result, **key)
    return row["figures"]


def number(value, digits=2):
    """The median, with the range if there are several samples."""
    if isinstance(value, dict) and value["samples"] > 1:
        return f"{value['median']:.{digits}f} ({value['low']:.{digits}f} to {value['high']:.{digits}f})"
    return f"{median(value):.{digits}f}"


def number_of(result, name, digits=2, **key):
    rows = select(result, **key)
    return number(rows[0]["figures"][name], digits) if rows else "-"


def table(head, rows):
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(row) + " |" for row in rows)])
