"""Encodes text with a tokenizer.json: the part of twobp/data/text/tokenizer.cpp that needs Python.

The script is compiled into the library and started with `python -c`; its argument is the path of the tokenizer.json.
It reads requests from stdin, one JSON object per line. It writes one answer per request to stdout in the same format,
and a first answer when it has started:

  (start)                              {"vocab": largest id + 1, "end_of_text": id or null}
  {"pieces": [length...], "width": 2}  {"tokens": n}, then their little-endian numbers of 2 or 4 bytes,
  and the pieces' UTF-8, one after     or {"not_utf8": offset in the bytes}
  the other
  any error                            {"error": message}
"""
import sys

sys.path[:] = [path for path in sys.path if path]  # -c adds the current folder, whose files are not modules

import array
import json
import os
import signal

PACKAGE = "tokenizers==0.23.3"
USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")

signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program handles Ctrl-C and ends this script
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # other output must not mix with the answers


def answer(value, raw=b""):
    answers.write(json.dumps(value).encode() + b"\n" + raw)
    answers.flush()


def read_json(path):
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
        return value if isinstance(value, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def end_of_text(tokenizer, folder):
    """The id of the eos_token in the tokenizer_config.json next to it, or else of a special token with a usual name."""
    name = read_json(os.path.join(folder, "tokenizer_config.json")).get("eos_token")
    if isinstance(name, dict):
        name = name.get("content")
    if isinstance(name, str) and tokenizer.token_to_id(name) is not None:
        return tokenizer.token_to_id(name)
    special = {token.content: id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return next((special[name] for name in USUAL_ENDS if name in special), None)


def load(path):
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise RuntimeError(f"{sys.executable} lacks the package tokenizers ({error}): pip install {PACKAGE}") from None
    with open(path, "rb") as file:
        tokenizer = Tokenizer.from_buffer(file.read())
    tokenizer.no_truncation()  # a tokenizer.json may request these, for batches of equal length
    tokenizer.no_padding()
    return tokenizer


def encode_pieces(tokenizer, request):
    pieces = [sys.stdin.buffer.read(length) for length in request["pieces"]]
    texts = []
    for piece in pieces:
        try:
            texts.append(piece.decode())
        except UnicodeDecodeError as error:
            offset = sum(map(len, pieces[: len(texts)])) + error.start
            return answer({"not_utf8": offset})
    encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)  # this variant computes no offsets
    ids = array.array("H" if request["width"] == 2 else "I")
    for encoding in encode(texts, add_special_tokens=False):
        ids.extend(encoding.ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return answer({"tokens": len(ids)}, ids.tobytes())


def main():
    path = sys.argv[1]
    tokenizer = load(path)
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    answer({"vocab": max(ids, default=-1) + 1, "end_of_text": end_of_text(tokenizer, os.path.dirname(path))})
    for line in sys.stdin.buffer:
        encode_pieces(tokenizer, json.loads(line))


try:
    main()
except BrokenPipeError:
    os._exit(0)  # the program has ended
except BaseException as error:  # panics of the package's Rust part are not Exceptions
    answer({"error": " ".join(str(error).split())[:400] or type(error).__name__})
    sys.exit(1)
