"""scripts/texts_to_arrays.py: how documents become samples, and that only the assistant's turns of a chat count."""
import json
import pathlib
import subprocess
import sys

import numpy
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/texts_to_arrays.py"
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests/random")]
import documents  # noqa: E402
import texts_to_arrays  # noqa: E402


def run(*arguments, code=0):
    done = subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stderr


def arrays(folder):
    return [numpy.load(folder / f"{name}.npy").tolist() for name in ("input_ids", "labels", "document_starts")]


def lines(path, field, values):
    path.write_text("".join(json.dumps({"id": 1, field: value}) + "\n\n" for value in values))
    return path


def test_whole_documents_are_packed_by_best_fit(tmp_path):
    source = lines(tmp_path / "a.jsonl", "text", ["abc", "A", "", "xyzw"])
    (tmp_path / "b.txt").write_text("p")
    run(source, tmp_path / "b.txt", tmp_path / "out", "--sequence", "5")
    ids, labels, starts = arrays(tmp_path / "out")
    assert ids == [list(b"abcp\0"), list(b"Axyzw")]
    assert labels == [[*b"abcp", -100], [*b"Axyzw"]]
    assert starts == [[0, 0, 0, 3, 4], [0, 1, 1, 1, 1]]
    assert texts_to_arrays.best_fit([3, 5, 7, 1, 2], 8) == [[0, 1], [2, 3], [4]]
    assert texts_to_arrays.best_fit([4, 4], 4) == [[0], [1]] and texts_to_arrays.best_fit([], 4) == []


def test_documents_are_split_padded_or_joined(tmp_path):
    source = lines(tmp_path / "a.jsonl", "body", ["abcde", "xyz", "p"])
    run(source, tmp_path / "split", "--sequence", "4", "--packing", "split", "--field", "body")
    ids, labels, starts = arrays(tmp_path / "split")
    assert ids == [list(b"abcd"), list(b"exyz")] and labels == ids and starts == [[0] * 4, [0, 1, 1, 1]]
    run(source, tmp_path / "none", "--sequence", "5", "--packing", "none", "--field", "body")
    assert numpy.load(tmp_path / "none/input_ids.npy").tolist() == [list(b"abcde"), list(b"xyz\0\0"), list(b"p\0\0\0\0")]
    assert numpy.load(tmp_path / "none/labels.npy").tolist()[1] == [*b"xyz", -100, -100]
    assert not (tmp_path / "none/document_starts.npy").exists()
    run(source, tmp_path / "stream", "--packing", "stream", "--field", "body")
    assert numpy.fromfile(tmp_path / "stream/tokens.bin", "<u2").tolist() == list(b"abcdexyzp")


def test_errors_name_the_document(tmp_path):
    good = '{"text": "good"}\n'
    for line, parts in (("[1]", ["no field 'text'"]), ('{"text": "cut', ["no JSON"]), ('{"txt": "a"}', ["no field 'text'", "--field"]),
                        ('{"text": null}', ["is None", "must be a text"]), ('{"text": 3}', ["is 3"]),
                        ('{"text": [{"role": "user"}]}', ["is a chat", "--tokenizer"]), ('{"text": "abcdef"}', ["6 tokens", "--packing split"])):
        (tmp_path / "a.jsonl").write_text(good + line + "\n")
        said = run(tmp_path / "a.jsonl", tmp_path / "out", "--sequence", "5", code=1)
        assert f"{tmp_path / 'a.jsonl'}:2" in said and all(part in said for part in parts), said
    (tmp_path / "a.txt").write_bytes(b"\xff")
    assert "a.txt: cannot be read" in run(tmp_path / "a.txt", tmp_path / "out", code=1)
    (tmp_path / "a.txt").write_text("text")
    assert "fewer tokens than a sample" in run(tmp_path / "a.txt", tmp_path / "out", "--packing", "split", code=1)
    run(tmp_path / "a.txt", tmp_path / "out", "--sequence", "4")
    assert "has data already" in run(tmp_path / "a.txt", tmp_path / "out", code=1)


def test_rows_of_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two é", None]}), tmp_path / "a.parquet")
    said = run(tmp_path / "a.parquet", tmp_path / "out", code=1)
    assert "a.parquet, row 3" in said
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two é"]}), tmp_path / "a.parquet")
    run(tmp_path / "a.parquet", tmp_path / "out", "--sequence", "9")
    assert arrays(tmp_path / "out")[0] == [list("onetwo é".encode())]
    assert "no field 'body', only text" in run(tmp_path / "a.parquet", tmp_path / "no", "--field", "body", code=1)


# ---- chats. Templates have the traits of current families; the tokenizer's tokens are bytes and a few special ones.

PLAIN = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.role[0] + ':' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
TURN = "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
TOOLS = (
    "{% if tools %}{{ tools | tojson + '\n' }}{% endif %}{% for m in messages %}{% if m.tool_calls %}"
    "{{ 'a:' + m.tool_calls | tojson + '\n' }}{% else %}{{ m.role[0] + ':' + m.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
CALLING = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{{ 'a:' }}{% if m.content %}{{ m.content + ' ' }}{% endif %}"
    "{% for c in m.tool_calls %}{{ '<' + c.function.name + c.function.arguments | tojson + '>' }}{% endfor %}{{ '\n' }}"
    "{% elif m.role in ['user', 'assistant', 'tool'] %}{{ m.role[0] + ':' + m.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
STYLES = {
    "plain": (PLAIN, "u:hi\na: yes \nu:so\na:no\n", " yes \n|no\n|"),
    "a default system message": (
        "{% if messages[0].role != 'system' %}{{ '<s>Be kind<e>\n' }}{% endif %}{% for m in messages %}"
        "{{ '<s>' + m.role + '\n' + m.content + '<e>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}",
        "<s>Be kind<e>\n<s>user\nhi<e>\n<s>assistant\n yes <e>\n<s>user\nso<e>\n<s>assistant\nno<e>\n", " yes <e>\n|no<e>\n|"),
    "marks": ("{% for m in messages %}{{ m.role[0] + ':' }}" + TURN + "{{ '\n' }}{% endfor %}", "u:hi\na: yes \nu:so\na:no\n", " yes |no|"),
    "marks in a macro": ("{% macro turn(m) %}{{ m.role[0] + ':' }}" + TURN + "{% endmacro %}{% for m in messages %}{{ turn(m) }};{% endfor %}",
                         "u:hi;a: yes ;u:so;a:no;", " yes |no|"),
    "trimmed": (
        "{% for m in messages %}{{ '<h>' + m.role + '</h>\n\n' + m.content | trim + '<eot>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<h>assistant</h>\n\n' }}{% endif %}",
        "<h>user</h>\n\nhi<eot><h>assistant</h>\n\nyes<eot><h>user</h>\n\nso<eot><h>assistant</h>\n\nno<eot>", "yes<eot>|no<eot>|"),
    "no prompt": ("{% for m in messages %}{% if m.role == 'user' %}{{ '[I] ' + m.content + '[/I]' }}{% else %}{{ ' ' + m.content | trim + '<end>' }}"
                  "{% endif %}{% endfor %}", "[I] hi[/I] yes<end>[I] so[/I] no<end>", " yes<end>| no<end>|"),
    "an end of its own": (
        "{% for m in messages %}{{ '<' + m.role + '>\n' + m.content + '<end>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}",
        "<user>\nhi<end>\n<assistant>\n yes <end>\n<user>\nso<end>\n<assistant>\nno<end>\n<|endoftext|>", " yes <end>\n|no<end>\n<|endoftext|>|"),
    "a thought in the last turn": (
        "{% for m in messages %}{{ m.role[0] + ':' + ('<t></t>' if loop.last and m.role == 'assistant' else '') + m.content | trim + ';\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'a:' }}{% endif %}", "u:hi;\na:yes;\nu:so;\na:<t></t>no;\n", "yes;\n|<t></t>no;\n|"),
}
CHAT = [{"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", " yes "), ("user", "so"), ("assistant", "no"))]


@pytest.fixture
def encode(tmp_path):
    transformers = pytest.importorskip("transformers")

    def encode(template, messages, tools=None):
        """The text of a chat, and the parts of it that count, each with a bar behind it."""
        documents.write_tokenizer(tmp_path, template)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
        ids, counted = texts_to_arrays.encode_chat(tokenizer, messages, tools)
        names = {id: name.encode() for name, id in documents.SPECIAL.items()}
        whole, parts = b"", b""
        for at, (id, counts) in enumerate(zip(ids, counted)):
            text = names.get(id, bytes([id % 256]))
            whole += text
            parts += (text + (b"" if at + 1 < len(ids) and counted[at + 1] else b"|")) if counts else b""
        return whole.decode(), parts.decode()

    return encode


@pytest.mark.parametrize("style", STYLES)
def test_only_the_turns_of_the_assistant_count(encode, style):
    template, text, counted = STYLES[style]
    assert encode(template, CHAT) == (text, counted)


def test_calls_of_tools_count(encode):
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}, {"type": "function", "function": {"name": "get", "arguments": {}}}]
    for content in ("wait", "", None):
        chat = [{"role": "user", "content": "hi", "tool_calls": None}, {"role": "assistant", "content": content, "tool_calls": calls},
                {"role": "tool", "content": "get"}, {"role": "assistant", "content": "yes"}]
        call = ("wait " if content else "") + '<add{"x": 1}><get{}>\n'
        assert encode(CALLING, chat) == (f"u:hi\na:{call}t:get\na:yes\n", f"{call}|yes\n|")


def test_tools_go_to_the_template(encode):
    tools = [{"name": "f", "description": None}]
    assert encode(TOOLS, CHAT[2:], tools)[0] == json.dumps(tools) + "\nu:so\na:no\n"
    assert encode(TOOLS, CHAT[2:])[0] == "u:so\na:no\n"
    with pytest.raises(RuntimeError, match="leaves out the record's tools"):
        encode(PLAIN, CHAT, tools)


@pytest.mark.parametrize(("template", "chat", "message"), [
    (PLAIN, [], "list of messages"), (PLAIN, CHAT[:1], "no turn of the assistant"), (PLAIN, [{"content": "hi"}], "role"),
    (PLAIN, [CHAT[0], {"role": "assistant"}], "message 2, of the role 'assistant', has no content"),
    (PLAIN, [{"role": "user", "content": 5}, CHAT[1]], "is 5, not a text"),
    (PLAIN, [CHAT[1], {"role": "tool", "content": "x"}], "no tools here"),
    # Its content occurs elsewhere in the text, so a search for it would not tell.
    (CALLING, [CHAT[0], {"role": "narrator", "content": "hi"}, CHAT[1]], "leaves out what message 2 says"),
    ("{% for m in messages %}{{ m.role[0] + ':' + (m.content if loop.last or m.role == 'user' else '-') + '\n' }}{% endfor %}",
     CHAT[:3], "message 2.*generation"),
    ("{% for m in messages %}{% set text %}" + TURN + "{% endset %}{{ text | trim }};{% endfor %}", CHAT[:2], "after it has marked it")])
def test_chats_that_cannot_be_told(encode, template, chat, message):
    with pytest.raises(RuntimeError, match=message):
        encode(template, chat)


def test_chats_become_samples(tmp_path):
    pytest.importorskip("transformers")
    documents.write_tokenizer(tmp_path, PLAIN)
    source = lines(tmp_path / "a.jsonl", "messages", [CHAT[2:], [{"role": "assistant", "content": "no"}, {"role": "user", "content": "a"}]])
    run(source, tmp_path / "out", "--tokenizer", tmp_path, "--field", "messages", "--sequence", "24")
    _, labels, _ = arrays(tmp_path / "out")
    assert ["".join("." if one < 0 else chr(one) for one in row) for row in labels] == ["." * 7 + "no\n" + "..no\n" + "." * 9]
    assert "is a chat" in run(source, tmp_path / "s", "--tokenizer", tmp_path, "--field", "messages", "--packing", "stream", code=1)
