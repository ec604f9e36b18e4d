"""Encodes and decodes text with a tokenizer.json: the half of twobp/data/text/tokenizer.cpp that needs Python.

It is compiled into the library and started with `python -c`; its argument is the path of the tokenizer.json. On stdin
come requests, a JSON object a line; on stdout goes an answer to each, likewise, and one unasked when it has started:

  (start)                              {"vocab": largest id + 1, "end_of_text": id or null}
  {"encode": text, "special": bool}    {"ids": [...]}
  {"decode": [id...], "special": bool} {"text": ...}
  {"pieces": [length...], "width": 2}  {"tokens": n}, then n little-endian numbers of 2 or 4 bytes
  and the pieces' UTF-8, one after     or {"not_utf8": offset in what came}
  the other
  whatever goes wrong                  {"error": message}
"""
import sys

sys.path[:] = [path for path in sys.path if path]  # -c puts the current folder there: what lies in it is no module

import array
import json
import os
import signal

PACKAGE = "tokenizers==0.23.3"
USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program, which ends us
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # whatever prints must not print among the answers


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
    """The id of what tokenizer_config.json beside it calls eos_token, else of a special token with a usual name."""
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
    tokenizer.no_truncation()  # a tokenizer.json may ask for these: they are for batches of one length
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
    encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)  # without offsets, where there is one
    ids = array.array("H" if request["width"] == 2 else "I")
    for encoding in encode(texts, add_special_tokens=False):
        ids.extend(encoding.ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return answer({"tokens": len(ids)}, ids.tobytes())


def handle(tokenizer, request):
    if "encode" in request:
        ids = tokenizer.encode(request["encode"], add_special_tokens=request["special"]).ids
        answer({"ids": ids})
    elif "decode" in request:
        answer({"text": tokenizer.decode(request["decode"], skip_special_tokens=not request["special"])})
    else:
        encode_pieces(tokenizer, request)


def main():
    path = sys.argv[1]
    tokenizer = load(path)
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    answer({"vocab": max(ids, default=-1) + 1, "end_of_text": end_of_text(tokenizer, os.path.dirname(path))})
    for line in sys.stdin.buffer:
        handle(tokenizer, json.loads(line))


try:
    main()
except BrokenPipeError:
    os._exit(0)  # the program is gone
except BaseException as error:  # panics of the package's Rust half are no Exception
    answer({"error": " ".join(str(error).split())[:400] or type(error).__name__})
    sys.exit(1)
