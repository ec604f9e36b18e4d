"""Random documents and chats, arrays of them by scripts/texts_to_arrays.py, and the sequences that a decoder must see of them, each by itself.

The tokens are bytes, and four special ones after them. The sequences are made here from the same pieces of text, without a tokenizer."""
import json
import pathlib
import subprocess
import sys

END_OF_TEXT, USER, ASSISTANT, END = range(256, 260)
BYTES, VOCAB = 256, 260  # vocabularies without a tokenizer and with it
PACKINGS = ("stream", "none", "split", "whole")
LEAST_CHAT = 16  # tokens of a short chat
SPECIAL = {"<|endoftext|>": END_OF_TEXT, "<user>": USER, "<assistant>": ASSISTANT, "<end>": END}
LETTERS = "abcdefgh .,\n\u00e9\u65e5\U0001f642"  # one to four bytes

# How templates write a chat, by what they are known for: the template, and the parts of a message, each with whether it counts.
MARKED = ("{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<end>' }}{% endgeneration %}"
          "{% else %}{{ m.content + '<end>' }}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")
ENDED = ("{% for m in messages %}{{ '<' + m.role + '>' + m.content + '<end>\n' }}{% endfor %}"
         "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}")
PLAIN = ("{% for m in messages %}{{ m.role[0] + ':' + m.content + '\n' }}{% endfor %}"
         "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}")
STYLES = {
    "marked": (MARKED, lambda role, content, answers: [(f"<{role}>", False), (content + "<end>", answers), ("\n", False)]),
    "ended": (ENDED, lambda role, content, answers: [(f"<{role}>", False), (content + "<end>\n", answers)]),
    "plain": (PLAIN, lambda role, content, answers: [(role[0] + ":", False), (content + "\n", answers)])}


def ids_of(text):
    """Tokens of a text: special tokens are whole, all else is bytes."""
    ids = []
    while text:
        name = next((name for name in SPECIAL if text.startswith(name)), None)
        ids += [SPECIAL[name]] if name else text[0].encode()
        text = text[len(name or text[0]):]
    return ids


def byte_character(byte):
    """The character of a byte in byte-level BPE (GPT-2): the byte itself if it is visible, else one above 255."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte if byte in seen else 256 + sum(other not in seen for other in range(byte)))


def write_tokenizer(folder, chat_template=None):
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": level, "post_processor": None,
        "decoder": level, "added_tokens": [{"id": id, "content": name, **flags} for name, id in SPECIAL.items()],
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "vocab": {byte_character(byte): byte for byte in range(256)}, "merges": []}}))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **({"chat_template": chat_template} if chat_template else {})}))


SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts/texts_to_arrays.py"


def words(dice, most):
    """A text of at most so many bytes, and of one at least."""
    text = "".join(dice.choice(LETTERS) for _ in range(dice.randint(1, most)))
    while len(text.encode()) > most:
        text = text[:-1]
    return text or "a"


def write_records(folder, dice, field, values):
    """One or two files of lines, some of them blank or with other fields."""
    cut = dice.choice([0, len(values) // 2])
    for name, part in (("a", values[:cut]), ("b", values[cut:])):
        lines = []
        for value in part:
            lines += [""] * (dice.random() < 0.1) + [json.dumps({"id": len(lines), field: value}, ensure_ascii=dice.random() < 0.5)]
        if lines:
            (folder / f"{name}.jsonl").write_text("\n".join(lines) + dice.choice(["", "\n"]), encoding="utf-8")


def write_texts(folder, dice, longest, vocab):
    """Options of the script, and documents as lists of (id, whether it is a target)."""
    texts = [words(dice, longest - 1) for _ in range(dice.randint(4, 14))]
    settings, end = [], []
    if vocab == VOCAB:
        write_tokenizer(folder)
        settings += ["--tokenizer", folder]
        if dice.random() < 0.7:
            end = [END_OF_TEXT]
        else:
            settings.append("--no-end-of-text")
    write_records(folder, dice, "text", texts + [""] * (dice.random() < 0.3))
    return settings, [[(id, True) for id in ids_of(text) + end] for text in texts]


def chat(dice, style, longest):
    """Messages, and their tokens as (id, whether it is a target). At least one turn of the assistant."""
    parts = STYLES[style][1]
    roles = ["user", "assistant"] * 3
    roles = roles[dice.random() < 0.2:][:dice.randint(2, 4)]
    while True:
        messages = [{"role": role, "content": words(dice, 5).strip() or "a"} for role in roles]
        pieces = [piece for message in messages for piece in parts(message["role"], message["content"], message["role"] == "assistant")]
        tokens = [(id, counts) for text, counts in pieces for id in ids_of(text)]
        if len(tokens) <= longest:
            return messages, tokens
        roles = roles[:2]


def write_chats(folder, dice, longest, vocab):
    style = dice.choice(list(STYLES))
    write_tokenizer(folder, STYLES[style][0])
    chats = [chat(dice, style, longest) for _ in range(dice.randint(4, 10))]
    write_records(folder, dice, "messages", [messages for messages, _ in chats])
    return ["--tokenizer", folder, "--field", "messages"], [tokens for _, tokens in chats]


def fewest_samples(lengths, sequence):
    """By best fit, the longest first."""
    room = []
    for length in sorted(lengths, reverse=True):
        best = min((i for i, left in enumerate(room) if left >= length), key=lambda i: room[i], default=None)
        if best is None:
            room.append(sequence - length)
        else:
            room[best] -= length
    return len(room)


def sequences_of(documents, packing, sequence):
    """What a decoder sees: the number of samples, and (ids, targets) of sequences that do not know of each other. The target of a position is the
    next token, or -100."""
    def aligned(tokens, following=None):
        after = [*tokens[1:], following]
        return [id for id, _ in tokens], [one[0] if one and one[1] else -100 for one in after]

    joined = [token for document in documents for token in document]
    if packing == "stream":
        count = (len(joined) - 1) // sequence
        return count, [aligned(joined[i:i + sequence], joined[i + sequence]) for i in range(0, count * sequence, sequence)]
    if packing == "split":
        count, begin, out = len(joined) // sequence, 0, []
        for document in documents:
            cuts = [0, *(i for i in range(1, len(document)) if (begin + i) % sequence == 0), len(document)]
            out += [aligned(document[a:b]) for a, b in zip(cuts, cuts[1:]) if begin + b <= count * sequence]
            begin += len(document)
        return count, out
    alone = [aligned(document) for document in documents]
    if packing == "none":  # padding comes behind, where no position sees it
        return len(alone), [(ids + [0] * (sequence - len(ids)), targets + [-100] * (sequence - len(ids))) for ids, targets in alone]
    return fewest_samples([len(document) for document in documents], sequence), alone


def write(folder, dice, kind, packing, sequence, vocab):
    """Writes "texts" or "chats" of which something counts. Returns the settings and what sequences_of returns."""
    folder = pathlib.Path(folder)
    longest = 3 * sequence if packing in ("stream", "split") else sequence
    while True:
        options, documents = (write_texts if kind == "texts" else write_chats)(folder, dice, longest, vocab)
        count, sequences = sequences_of(documents, packing, sequence)
        if any(target >= 0 for _, targets in sequences for target in targets):
            break
        for path in folder.glob("*.jsonl"):
            path.unlink()
    subprocess.run([sys.executable, SCRIPT, *sorted(folder.glob("*.jsonl")), folder / "out", "--sequence", str(sequence), "--packing", packing, *options],
                   check=True, stdout=subprocess.DEVNULL)
    source = f"data.tokens={folder}/out/tokens.bin" if packing == "stream" else f"data.arrays={folder}/out"
    return [source, f"data.sequence={sequence}"], count, sequences


def draw(folder, dice, vocab, packings=PACKINGS, most=32):
    """Of any kind, in samples of at most so many positions. `vocab` is one of the two above."""
    kind = dice.choice(["texts", "chats"]) if vocab == VOCAB and most >= LEAST_CHAT else "texts"
    packing = dice.choice([one for one in packings if kind == "texts" or one != "stream"])
    return write(folder, dice, kind, packing, dice.randint(LEAST_CHAT if kind == "chats" else 5, most), vocab)


def lengths_of(dice, sequence):
    """Of two to four slices."""
    cuts = [0, *sorted(dice.sample(range(1, sequence), dice.randint(1, min(3, sequence - 1)))), sequence]
    return [b - a for a, b in zip(cuts, cuts[1:])]


def slices_of(dice, sequence):
    """Settings that cut sequences."""
    lengths = lengths_of(dice, sequence)
    return [f"pipeline.slices={len(lengths)}", f"pipeline.slice_lengths={lengths}".replace(" ", "")]
