#!/usr/bin/env python3
"""Makes arrays for data.arrays, or tokens for data.tokens, of documents: files of text, one document each, and lines of
.jsonl files or rows of .parquet files, whose field --field is a text or a chat (a list of messages with `role` and
`content`). Chats are rendered by the tokenizer's chat template, and only the assistant's turns are labels.

    scripts/texts_to_arrays.py SOURCE... OUT --tokenizer FOLDER --sequence 2048 [--packing none|split|whole|stream]

  none    a sample is one document, and padding (id 0) behind it
  whole   a sample is several documents, kept apart, and padding: best fit, decreasing (arXiv 2404.10830)
  split   a sample is the next part of all documents, kept apart
  stream  all documents, joined: OUT gets tokens.bin, of data.token_type uint16 or, from 65,537 tokens on, uint32

The first three write input_ids.npy and labels.npy and, if a sample has several documents, document_starts.npy. A text
ends with the tokenizer's eos_token, unless --no-end-of-text is given. Without --tokenizer, tokens are bytes.
"""

import argparse
import bisect
import json
import os
import pathlib
import re
import sys

import numpy

IGNORED = -100


def die(message):
    sys.exit(f"texts_to_arrays.py: {message}")


def read_lines(path, field):
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            origin = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                die(f"{origin}: is no JSON: {error}")
            if not isinstance(record, dict) or field not in record:
                die(f"{origin}: has no field {field!r}: name one by --field")
            yield origin, record[field], record.get("tools")


def without_nulls(value):
    """The structs of a column have the keys of all rows, and null where a row has none. The content of a message may
    be null itself."""
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None or key == "content"}
    return value


def read_rows(path, field):
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if field not in names:
            die(f"{path}: has no field {field!r}, only {', '.join(names)}: name one by --field")
        number = 0
        for batch in file.iter_batches(columns=[field, *({"tools"} & set(names) - {field})], batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", without_nulls(row[field]), without_nulls(row.get("tools"))


def read_documents(path, field):
    """Each document of the file: its origin, a text or a list of messages, and the tools of a chat."""
    if path.suffix in (".jsonl", ".ndjson"):
        yield from read_lines(path, field)
    elif path.suffix == ".parquet":
        yield from read_rows(path, field)
    else:
        yield str(path), path.read_text(encoding="utf-8"), None


def load_tokenizer(folder):
    sys.modules["torch"] = None  # takes seconds to import, and encodes nothing
    import transformers

    transformers.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not tokenizer.is_fast:
        die(f"{folder} has no tokenizer.json, so the places of its tokens in the text are unknown")
    return tokenizer


class Encoder:
    def __init__(self, tokenizer, end_of_text):
        self.tokenizer, self.end = tokenizer, tokenizer.eos_token_id if tokenizer and end_of_text else None

    def vocabulary(self):
        return len(self.tokenizer) if self.tokenizer else 256

    def encode(self, document, tools):
        """The ids, and whether each is a label."""
        if isinstance(document, list):
            if not self.tokenizer or not self.tokenizer.chat_template:
                raise RuntimeError("is a chat, which needs a tokenizer with a chat template: name its folder by --tokenizer")
            return encode_chat(self.tokenizer, document, json.loads(tools) if isinstance(tools, str) else tools)
        if not isinstance(document, str):
            raise RuntimeError(f"is {document!r}, but must be a text, or the list of messages of a chat")
        ids = self.tokenizer(document, add_special_tokens=False)["input_ids"] if self.tokenizer else list(document.encode())
        if ids and self.end is not None and ids[-1] != self.end:
            ids = [*ids, self.end]
        return ids, [True] * len(ids)


GENERATION, END_OF_GENERATION = (re.compile(rf"\{{%([-+]?)\s*{name}\s*([-+]?)%\}}") for name in ("generation", "endgeneration"))


class Template:
    """A tokenizer's template for chats with these tools. Of several templates, transformers takes `tool_use` for chats with tools, else `default`."""

    def __init__(self, tokenizer, tools):
        self.tokenizer, self.tools = tokenizer, tools or None

    def render(self, messages, **options):
        """Returns what the template makes of the messages. A template is a program, which may fail with any error."""
        try:
            return self.tokenizer.apply_chat_template(messages, tools=self.tools, **options)
        except Exception as error:
            raise RuntimeError(f"the chat template cannot render this chat: {error}") from None

    def is_marked(self):
        """Whether the template itself marks what the assistant generates."""
        return GENERATION.search(self.tokenizer.get_chat_template(tools=self.tools)) is not None

    def render_marks(self, messages, begin, end):
        """Returns the text with the characters `begin` and `end` around what the template marks. Statements print them, so that the template's spaces
        and newlines stay as they are."""
        source = self.tokenizer.get_chat_template(tools=self.tools)
        source = GENERATION.sub(rf'{{%\1 generation %}}{{% print "{begin}" \2%}}', source)
        source = END_OF_GENERATION.sub(rf'{{%\1 print "{end}" %}}{{% endgeneration \2%}}', source)
        return self.render(messages, tokenize=False, chat_template=source)


def marks_for(text):
    """Yields characters for private use that the text does not have."""
    return (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in text)


def mark_for(text):
    return next(marks_for(text))


def refuse_lost_messages(template, messages, text):
    """Many templates skip a role that they do not know. To train on the rest would be to train on another chat."""
    mark = mark_for(text)
    for i, message in enumerate(messages):
        copy = next(with_mark(message, mark), None)
        if message["role"] != "assistant" and copy and mark not in template.render([*messages[:i], copy, *messages[i + 1:]], tokenize=False):
            raise RuntimeError(f"the chat template leaves out what message {i + 1} says, whose role is {message['role']!r}: remove the message, or "
                               "give it a role that the template knows there, and a content that is a text")


def encode_marked(template, messages, text):
    """Every token counts that has a character of a marked span, as in transformers 5.24. Earlier versions find other tokens."""
    marks = marks_for(text)
    begin, end = next(marks), next(marks)
    spans, place = [], 0
    parts = re.split(f"([{begin}{end}])", template.render_marks(messages, begin, end))
    for part in parts:
        if part == begin:
            spans.append((place, None))
        elif part == end and spans and spans[-1][1] is None:
            spans[-1] = (spans[-1][0], place)
        else:
            place += len(part)
    if "".join(parts[::2]) != text or any(last is None for _, last in spans):
        raise RuntimeError("the template changes the text between {% generation %} and {% endgeneration %} after it has marked it, so that the marked tokens "
                           "cannot be told: put the marks around what it prints in the end")
    encoding = template.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoding["input_ids"], [any(first < end and last > begin for begin, end in spans) for first, last in encoding["offset_mapping"]]


def with_mark(message, mark):
    """Yields copies of the message with the mark at an end of what it says: of its text, of the name of the last tool that it calls."""
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list) and content and isinstance(content[-1], dict) and isinstance(content[-1].get("text"), str):
        yield {**message, "content": [*content[:-1], {**content[-1], "text": marked_text(content[-1]["text"], mark)}]}
    if isinstance(content, str):
        yield {**message, "content": marked_text(content, mark)}
    if isinstance(calls, list) and calls and isinstance(calls[-1], dict):
        call = calls[-1].get("function", calls[-1])
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            named = {**call, "name": call["name"] + mark}
            yield {**message, "tool_calls": [*calls[:-1], {**calls[-1], "function": named} if "function" in calls[-1] else named]}


def marked_text(text, mark):
    """The mark precedes spaces at the end, which a template may strip."""
    end = len(text.rstrip())
    return text[:end] + mark + text[end:]


def begin_of_first(message, text, end):
    """Where the text of a chat's first message begins, before which there is no prompt to answer; -1 if it cannot be told."""
    content = message["content"].strip() if isinstance(message.get("content"), str) else None
    return end - len(content) if content is not None and text[:end].endswith(content) else -1


def assistant_span(template, messages, i, text):
    """The characters of the assistant's turn, (begin, sure, end): from the end of the prompt to answer what precedes it, to the end of its content
    and of what the template adds to a turn that ends a chat. If that is not what follows this turn, as where a chat ends with a token of its
    own, `sure` is the end of the content, and `end` that of what both begin with. None if it cannot be told."""
    mark = mark_for(text)
    before = template.render(messages[:i], tokenize=False, add_generation_prompt=True) if i else ""
    for copy in with_mark(messages[i], mark):
        whole = template.render([*messages[:i], copy, *messages[i + 1:]], tokenize=False)
        end = whole.find(mark, len(before))
        begin = len(before) if i else begin_of_first(messages[0], text, end)
        if not text.startswith(before) or whole.replace(mark, "", 1) != text or min(begin, end) < 0:
            continue
        tail = template.render([*messages[:i], copy], tokenize=False).rpartition(mark)[2]
        last = end + len(os.path.commonprefix([tail, text[end:]]))
        if last == end + len(tail):
            return begin, last, last
        if not messages[i].get("tool_calls"):  # they may follow the content
            return begin, end, last
    return None


def encode_unmarked(template, messages, text):
    spans = []
    for i in [i for i, message in enumerate(messages) if message["role"] == "assistant"]:
        spans.append(assistant_span(template, messages, i, text))
        if spans[-1] is None:
            raise RuntimeError(f"the place of message {i + 1} in the template's text cannot be told: put {{% generation %}} and "
                               "{% endgeneration %} around the assistant's part in the template")
    encoding = template.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    counted = [any(begin <= first < sure or sure <= first and last <= end for begin, sure, end in spans) for first, last in encoding["offset_mapping"]]
    return encoding["input_ids"], counted


def refuse_lost_tools(template, messages, text):
    try:
        lost = template.tools and Template(template.tokenizer, None).render(messages, tokenize=False) == text
    except RuntimeError:
        lost = False  # it needs them
    if lost:
        raise RuntimeError("the chat template leaves out the record's tools, so that the model would call what it does not know: remove the field \"tools\", "
                           "or give a template that renders them")


def encode_chat(tokenizer, messages, tools):
    """The ids of a chat, and whether each is of a turn of the assistant."""
    if not messages or not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
        raise RuntimeError("a chat is a list of messages with a role and content")
    for i, message in enumerate(messages):
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise RuntimeError(f"message {i + 1}, of the role {message['role']!r}, has no content: give it a text, or remove the message")
        if not isinstance(content, (str, list, type(None))):
            raise RuntimeError(f"the content of message {i + 1}, of the role {message['role']!r}, is {content!r}, not a text: put it in quotes")
    if not any(message["role"] == "assistant" for message in messages):
        raise RuntimeError("the chat has no turn of the assistant, so there is nothing to learn: remove it")
    # A column of a table is null where a message has no such key, and templates ask whether it has.
    messages = [{key: value for key, value in message.items() if value is not None or key == "content"} for message in messages]
    template = Template(tokenizer, tools)
    text = template.render(messages, tokenize=False)
    refuse_lost_messages(template, messages, text)
    refuse_lost_tools(template, messages, text)
    ids, counted = encode_marked(template, messages, text) if template.is_marked() else encode_unmarked(template, messages, text)
    if not any(counted):
        raise RuntimeError("the template renders nothing of the assistant's turns")
    return ids, counted


def best_fit(lengths, capacity):
    """The documents of each sample of at most `capacity` tokens. Documents are taken from the longest on; each goes to
    the sample with the least room that it fits into."""
    samples, by_room, rooms = [], {}, []
    for document in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        at = bisect.bisect_left(rooms, lengths[document])
        if at == len(rooms):
            sample, room = len(samples), capacity
            samples.append([])
        else:
            room = rooms[at]
            sample = by_room[room].pop()
            if not by_room[room]:
                rooms.pop(at)
        samples[sample].append(document)
        left = room - lengths[document]
        if not by_room.setdefault(left, []):
            bisect.insort(rooms, left)
        by_room[left].append(sample)
    return sorted(sorted(sample) for sample in samples)


def parts_of(documents, packing, sequence):
    """The parts of each sample: (document, begin, end)."""
    if packing == "split":
        samples, room = [], 0
        for number, (_, ids, _) in enumerate(documents):
            begin = 0
            while begin < len(ids):
                if room == 0:
                    samples.append([])
                    room = sequence
                end = min(len(ids), begin + room)
                samples[-1].append((number, begin, end))
                room -= end - begin
                begin = end
        return samples[:-1] if room else samples
    for origin, ids, _ in documents:
        if len(ids) > sequence:
            die(f"{origin} has {len(ids)} tokens, more than --sequence {sequence}: shorten it, or take --packing split")
    whole = best_fit([len(ids) for _, ids, _ in documents], sequence) if packing == "whole" else [
        [number] for number in range(len(documents))
    ]
    return [[(number, 0, len(documents[number][1])) for number in sample] for sample in whole]


def write_arrays(out, documents, packing, sequence):
    samples = parts_of(documents, packing, sequence)
    if not samples:
        die(f"all documents together have fewer tokens than a sample (--sequence {sequence}): give more")
    ids = numpy.zeros((len(samples), sequence), numpy.int32)
    labels = numpy.full(ids.shape, IGNORED, numpy.int32)
    starts = numpy.tile(numpy.arange(sequence, dtype=numpy.int32), (len(samples), 1))
    for row, sample in enumerate(samples):
        at = 0
        for number, begin, end in sample:
            _, tokens, counted = documents[number]
            place = slice(at, at + end - begin)
            ids[row, place] = tokens[begin:end]
            labels[row, place] = numpy.where(counted[begin:end], tokens[begin:end], IGNORED)
            starts[row, place] = at
            at += end - begin
    numpy.save(out / "input_ids.npy", ids)
    numpy.save(out / "labels.npy", labels)
    if packing != "none":
        numpy.save(out / "document_starts.npy", starts)
    print(f"{out}: {len(samples)} samples of {sequence} tokens, {len(documents)} documents")


def write_stream(out, documents, vocabulary):
    kind = "<u2" if vocabulary <= 1 << 16 else "<u4"
    with open(out / "tokens.bin", "wb") as file:
        for origin, ids, counted in documents:
            if not all(counted):
                die(f"{origin}: is a chat, whose turns a stream does not keep apart: take --packing none, split or whole")
            file.write(numpy.array(ids, kind).tobytes())
    total = sum(len(ids) for _, ids, _ in documents)
    print(f"{out / 'tokens.bin'}: {total} tokens of data.token_type {'uint16' if kind == '<u2' else 'uint32'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="+", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--tokenizer", help="Hugging Face directory; without it, tokens are bytes")
    parser.add_argument("--sequence", type=int, default=256, help="tokens of a sample, as in data.sequence")
    parser.add_argument("--packing", choices=("none", "split", "whole", "stream"), default="whole")
    parser.add_argument("--field", default="text", help="of .jsonl and .parquet files")
    parser.add_argument("--no-end-of-text", action="store_true", help="add no eos_token")
    options = parser.parse_args()
    if any((options.out / name).exists() for name in ("input_ids.npy", "tokens.bin")):
        die(f"{options.out} has data already: name another folder, or remove it")
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
    encoder = Encoder(tokenizer, not options.no_end_of_text)
    documents = []
    for path in options.source:
        try:
            for origin, document, tools in read_documents(path, options.field):
                try:
                    ids, counted = encoder.encode(document, tools)
                except RuntimeError as error:
                    die(f"{origin}: {error}")
                if ids:
                    documents.append((origin, numpy.array(ids, numpy.int32), numpy.array(counted, bool)))
        except (OSError, UnicodeDecodeError) as error:
            die(f"{path}: cannot be read: {error}")
    if not documents:
        die("no document has text")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.packing == "stream":
        write_stream(options.out, documents, encoder.vocabulary())
    else:
        write_arrays(options.out, documents, options.packing, options.sequence)


if __name__ == "__main__":
    main()
