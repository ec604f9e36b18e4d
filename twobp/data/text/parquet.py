"""Reads a column of a parquet file: the part of twobp/data/text/documents.cpp that needs Python.

The script is compiled into the library and started with `python -c`; its arguments are the file, the column, and another that may be missing. It writes one
JSON list per row to stdout, [value, value of the other column or null], in order, then {"rows": number}; or {"error": message}.
"""
import sys

sys.path[:] = [path for path in sys.path if path]  # -c adds the current folder, whose files are not modules

import json
import os
import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program handles Ctrl-C and ends this script
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # other output must not mix with the answers


def without_nulls(value):
    """The structs of a column have the keys of all rows, and null where a row has none. The content of a message may be null itself."""
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None or key == "content"}
    return value


def refuse(value, row, column):
    """Raises an error for a value that JSON does not have."""
    raise RuntimeError(f"row {row}: the field \"{column}\" or its tools hold a value of the type {type(value).__name__}, but must hold texts: write the column "
                       "as strings, such as by column.cast(\"string\")")


def main(path, column, other):
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise RuntimeError(f"{sys.executable} lacks the package pyarrow ({error}), which reads parquet: pip install pyarrow") from None
    with pyarrow.parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if column not in names:
            raise RuntimeError(f"has no field \"{column}\", only {', '.join(names)}: name one in data.field")
        rows = 0
        for batch in file.iter_batches(columns=[column, *({other} & set(names) - {column})], batch_size=1024):
            for row in batch.to_pylist():
                rows += 1
                values = [without_nulls(row[column]), without_nulls(row.get(other))]
                answers.write(json.dumps(values, default=lambda value: refuse(value, rows, column)).encode() + b"\n")
    answers.write(json.dumps({"rows": rows}).encode() + b"\n")


try:
    main(*sys.argv[1:])
except BrokenPipeError:
    os._exit(0)  # the program has ended
except BaseException as error:
    answers.write(json.dumps({"error": " ".join(str(error).split())[:400] or type(error).__name__}).encode() + b"\n")
    answers.flush()
    sys.exit(1)
answers.flush()
