"""Renders chats with the template of a model's tokenizer, and encodes them: the part of twobp/data/text/chat.cpp that needs Python.

The script is compiled into the library and started with `python -c`; its argument is the tokenizer's folder. It reads chats from stdin, one
JSON list of messages per line, and writes one answer per chat to stdout:

  (start)            {"ready": true}
  [message, ...]     {"ids": [...], "counted": [[begin, end], ...]}   ranges of the tokens of assistant turns
  any error          {"error": message}, after which the next chat may follow
"""
import sys

sys.path[:] = [path for path in sys.path if path]  # -c adds the current folder, whose files are not modules

import json
import os
import re
import signal

import jinja2  # of transformers

signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program handles Ctrl-C and ends this script
MARK = "\ue000"  # for private use: no text and no template has it
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # other output must not mix with the answers


def answer(value):
    answers.write(json.dumps(value).encode() + b"\n")
    answers.flush()


def load(folder):
    sys.modules["torch"] = None  # takes seconds to import, and renders nothing
    try:
        import transformers
    except ImportError as error:
        raise RuntimeError(f"{sys.executable} lacks the package transformers ({error}), which renders chats: pip install transformers") from None
    transformers.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not tokenizer.is_fast:
        raise RuntimeError("the tokenizer has no tokenizer.json, so the places of its tokens in the text are unknown")
    if not isinstance(tokenizer.chat_template, str):
        raise RuntimeError("the tokenizer has no chat template, or several: give a folder with chat_template.jinja, or render the chats yourself")
    return tokenizer


def marked(tokenizer):
    """Whether the template itself marks what the assistant generates."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.chat_template) is not None


def encode_marked(tokenizer, messages):
    encoding = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    return encoding["input_ids"], list(map(bool, encoding["assistant_masks"]))


def assistant_spans(tokenizer, messages, text):
    """The characters of each assistant turn, (begin, sure, end): from the end of the prompt to answer what precedes it, to the end of its content
    and of what the template adds to a turn that ends a chat. If that is not what follows this turn, as where a chat ends with a token of its
    own, `sure` is the end of the content, and `end` that of what both begin with."""
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if not isinstance(message.get("content"), str):
            raise RuntimeError(f"message {i + 1} has no content that is a text")
        content = message["content"].rstrip()  # a template may strip the rest
        content += MARK + message["content"][len(content):]
        longer = [*messages[:i], {**message, "content": content}, *messages[i + 1:]]
        before = tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True) if i else ""
        whole = tokenizer.apply_chat_template(longer, tokenize=False)
        end = whole.find(MARK, len(before))
        if not text.startswith(before) or whole.replace(MARK, "", 1) != text or end < 0:
            raise RuntimeError(f"the place of message {i + 1} in the template's text cannot be told: put {{% generation %}} and "
                               "{% endgeneration %} around the assistant's part in the template")
        _, _, tail = tokenizer.apply_chat_template(longer[:i + 1], tokenize=False).rpartition(MARK)
        last = end + len(os.path.commonprefix([tail, text[end:]]))
        spans.append((len(before), last if last == end + len(tail) else end, last))
    return spans


def encode_unmarked(tokenizer, messages):
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    spans = assistant_spans(tokenizer, messages, text)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    counted = [any(begin <= first < sure or sure <= first and last <= end for begin, sure, end in spans) for first, last in encoding["offset_mapping"]]
    return encoding["input_ids"], counted


def ranges(counted):
    """[begin, end) of each run of True."""
    edges = [i for i in range(len(counted) + 1) if (i > 0 and counted[i - 1]) != (i < len(counted) and counted[i])]
    return list(zip(edges[::2], edges[1::2]))


def encode(tokenizer, messages):
    if not messages or not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
        raise RuntimeError("a chat is a list of messages with a role and content")
    if not any(message["role"] == "assistant" for message in messages):
        raise RuntimeError("the chat has no turn of the assistant, so there is nothing to learn: remove it")
    try:
        ids, counted = encode_marked(tokenizer, messages) if marked(tokenizer) else encode_unmarked(tokenizer, messages)
    except jinja2.TemplateError as error:
        raise RuntimeError(f"the chat template cannot render this chat: {error}") from None
    if not any(counted):
        raise RuntimeError("the template renders nothing of the assistant's turns")
    return {"ids": ids, "counted": ranges(counted)}


def main():
    tokenizer = load(sys.argv[1])
    answer({"ready": True})
    for line in sys.stdin.buffer:
        try:
            answer(encode(tokenizer, json.loads(line)))
        except Exception as error:
            answer({"error": message_of(error)})


def message_of(error):
    return " ".join(str(error).split())[:400] or type(error).__name__


try:
    main()
except BrokenPipeError:
    os._exit(0)  # the program has ended
except BaseException as error:
    answer({"error": message_of(error)})
    sys.exit(1)
