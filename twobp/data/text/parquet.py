"""Reads a column of a parquet file: the part of twobp/data/text/documents.cpp that needs Python.

The script is compiled into the library and started with `python -c`; its arguments are the file and the column. It writes one JSON value per
row to stdout, in order, then {"rows": number}; or {"error": message}.
"""
import sys

sys.path[:] = [path for path in sys.path if path]  # -c adds the current folder, whose files are not modules

import json
import os
import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program handles Ctrl-C and ends this script
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # other output must not mix with the answers


def main(path, column):
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise RuntimeError(f"{sys.executable} lacks the package pyarrow ({error}), which reads parquet: pip install pyarrow") from None
    with pyarrow.parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if column not in names:
            raise RuntimeError(f"has no field \"{column}\", only {', '.join(names)}: name one in data.field")
        rows = 0
        for batch in file.iter_batches(columns=[column], batch_size=1024):
            for value in batch.column(0).to_pylist():
                answers.write(json.dumps(value).encode() + b"\n")
                rows += 1
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
