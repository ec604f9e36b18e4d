"""Renders chats with the template of a model's tokenizer, and encodes them: the part of twobp/data/text/chat.cpp that needs Python.

The script is compiled into the library and started with `python -c`; its argument is the tokenizer's folder. It reads chats from stdin, one
JSON object per line, and writes one answer per chat to stdout:

  (start)                                       {"ready": true}
  {"messages": [message, ...], "tools": [...]}  {"ids": [...], "counted": [[begin, end], ...]}   ranges of the tokens of assistant turns
  any error                                     {"error": message}, after which the next chat may follow
"""
import sys

sys.path[:] = [path for path in sys.path if path]  # -c adds the current folder, whose files are not modules

import json
import os
import re
import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program handles Ctrl-C and ends this script
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
    if not tokenizer.chat_template:
        raise RuntimeError("the tokenizer has no chat template: give a folder with chat_template.jinja, or render the chats yourself")
    return tokenizer


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


def ranges(counted):
    """[begin, end) of each run of True."""
    edges = [i for i in range(len(counted) + 1) if (i > 0 and counted[i - 1]) != (i < len(counted) and counted[i])]
    return list(zip(edges[::2], edges[1::2]))


def refuse_lost_tools(template, messages, text):
    try:
        lost = template.tools and Template(template.tokenizer, None).render(messages, tokenize=False) == text
    except RuntimeError:
        lost = False  # it needs them
    if lost:
        raise RuntimeError("the chat template leaves out the record's tools, so that the model would call what it does not know: remove the field \"tools\", "
                           "or give a template that renders them")


def encode(tokenizer, messages, tools):
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
    return {"ids": ids, "counted": ranges(counted)}


def main():
    tokenizer = load(sys.argv[1])
    answer({"ready": True})
    for line in sys.stdin.buffer:
        try:
            answer(encode(tokenizer, **json.loads(line)))
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
