// Tests documents in lines, rows and files, and errors in them.
#include "twobp/data/text/documents.h"

#include <gtest/gtest.h>

#include "tokenizer_files.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;
using test::TempFolder;

std::vector<Document> read(const std::vector<std::string>& files, const std::string& field = "text") {
  std::vector<Document> all;
  for_each_document(files, field, [&](const Document& document) { all.push_back(document); });
  return all;
}

TEST(Documents, ReadLinesAndFiles) {
  const TempFolder folder;
  const std::string lines = folder.write("a.jsonl",
                                         "{\"text\": \"one\\nline\", \"id\": 1}\r\n\n  \n{\"text\": "
                                         "\"\\u00e9\"}\n{\"text\": [{\"role\": \"user\"}]}");
  const std::string file = folder.write("b.txt", "two\nlines\n");
  const std::vector<Document> all = read({lines, file});
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(all[0].text, "one\nline");
  EXPECT_EQ(all[0].origin, lines + ":1");
  EXPECT_EQ(all[1].text, "\xc3\xa9");
  EXPECT_EQ(all[1].origin, lines + ":4");
  EXPECT_FALSE(all[1].chat);
  EXPECT_EQ(all[2].text, R"([{"role":"user"}])");
  EXPECT_TRUE(all[2].chat);
  EXPECT_EQ(all[2].tools, "");
  EXPECT_EQ(all[3].text, "two\nlines\n");
  EXPECT_EQ(all[3].origin, file);
  // This line is longer than the buffer for reading files.
  const std::string text(3 << 20, 'x');
  EXPECT_EQ(read({folder.write("c.jsonl", "{\"t\": \"" + text + "\"}\n")}, "t").at(0).text, text);
}

TEST(Documents, ReadLinesByTheEndingOfTheName) {
  const TempFolder folder;
  for (const char* name : {"a.ndjson", "a.JSONL", "a.Ndjson", "a.jsonlines", "a.jl"}) {
    const std::string path = folder.write(name, "{\"text\": \"one\"}\n{\"text\": \"two\"}\n");
    EXPECT_TRUE(has_records(path));
    const std::vector<Document> all = read({path});
    ASSERT_EQ(all.size(), 2u) << name;
    EXPECT_EQ(all[1].text, "two");
  }
  EXPECT_TRUE(has_records("a.Parquet"));
  EXPECT_FALSE(has_records("ajsonl"));
}

TEST(Documents, NameTheLineThatIsWrong) {
  const TempFolder folder;
  const auto refuse = [&](const std::string& line, const std::vector<std::string>& parts) {
    const std::string path = folder.write("a.jsonl", "{\"text\": \"good\"}\n" + line + "\n");
    std::vector<std::string> all = parts;
    all.push_back(path + ":2");
    expect_error([&] { read({path}); }, all);
  };
  refuse("{\"text\": \"cut", {});
  refuse("[1]", {"not a JSON object"});
  refuse("{\"txt\": \"a\", \"id\": 1}", {"no field \"text\"", "txt", "data.field"});
  refuse("{\"text\": null}", {"\"text\" holds null", "remove the record"});
  refuse("{\"text\": 3}", {"\"text\" holds number", "list of messages"});
  refuse("{\"text\": \"a\", \"text\": \"b\"}", {"text"});
  refuse("{\"text\": \"\xff\"}", {});
  refuse(R"({"text": [], "tools": 3})", {"\"tools\" of a chat holds number", "list of tools"});
  refuse(R"({"text": [], "tools": "[1"})", {"\"tools\""});
}

// Templates render calls and tools, so the keys keep their order.
TEST(Documents, ReadTools) {
  const TempFolder folder;
  const std::string tools = R"([{"name":"b","arguments":{"y":1,"x":[]}}])";
  const std::vector<Document> all = read({folder.write(
      "a.jsonl", R"({"text": [{"role": "user", "a": 1}], "tools": )" + tools + "}\n" + R"({"tools": )" +
                     nlohmann::json(tools).dump() + R"(, "text": []})" + "\n" + R"({"text": "x", "tools": 7})")});
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all[0].text, R"([{"role":"user","a":1}])");
  EXPECT_EQ(all[0].tools, tools);
  EXPECT_EQ(all[1].tools, tools);
  EXPECT_EQ(all[2].tools, "") << "a text has none";
}

TEST(Documents, ReadParquet) {
  const TempFolder folder;
  const std::string path = folder.path("rows.parquet");
  folder.write("make.py",
               "import sys, pyarrow, pyarrow.parquet\n"
               "pyarrow.parquet.write_table(pyarrow.table({'text': ['one', 'two \\u00e9', None],\n"
               "  'bytes': [b'one', b'two', b'three'], 'parts': [[{'role': 'user', 'content': b'hi'}]] * 3,\n"
               "  'chat': [[{'role': 'user', 'content': 'hi'}]] * 3,\n"
               "  'calls': [[{'role': 'user', 'content': 'a'}, {'content': None, 'call': {'x': 1}}, {'call': "
               "{'y': 2}}]] * 3,\n"
               "  'tools': [[{'name': 'f', 'x': 1}, {'name': 'g', 'y': 2}], [], None]}), sys.argv[1])\n");
  const std::string make =
      test::absolute_python() + " " + folder.path("make.py") + " " + path + " 2> " + folder.path("errors");
  if (std::system(make.c_str()) != 0) GTEST_SKIP() << test::read_file(folder.path("errors"));
  std::vector<std::string> texts;
  expect_error([&] { for_each_document({path}, "text", [&](const Document& one) { texts.push_back(one.text); }); },
               {path + ", row 3", "holds null", "remove the record"});
  for (const char* column : {"bytes", "parts"}) {
    expect_error([&] { read({path}, column); },
                 {path, "row 1", concat('"', column, '"'), "type bytes", "cast(\"string\")"});
  }
  EXPECT_EQ(texts, (std::vector<std::string>{"one", "two \xc3\xa9"}));
  const std::vector<Document> chats = read({path}, "chat");
  ASSERT_EQ(chats.size(), 3u);
  EXPECT_TRUE(chats[0].chat);
  EXPECT_EQ(nlohmann::json::parse(chats[0].text)[0]["content"], "hi");
  EXPECT_EQ(chats[2].origin, path + ", row 3");
  EXPECT_EQ(chats[0].tools, R"([{"name":"f","x":1},{"name":"g","y":2}])") << "without the nulls of structs";
  EXPECT_EQ(chats[1].tools + chats[2].tools, "");
  EXPECT_EQ(read({path}, "calls")[0].text,
            R"([{"role":"user","content":"a"},{"content":null,"call":{"x":1}},{"content":null,"call":{"y":2}}])");
  expect_error([&] { read({path}, "body"); },
               {path, "no field \"body\"", "text, bytes, parts, chat, calls, tools", "data.field"});
  expect_error([&] { read({folder.write("bad.parquet", "no parquet")}); }, {"bad.parquet"});
}

TEST(Documents, NeedAPackageForParquet) {
  const TempFolder folder;
  const test::Environment none(
      "TWOBP_PYTHON", test::write_program(folder, "python", "exec '" + test::absolute_python() + "' -S -I \"$@\""));
  expect_error([&] { read({folder.write("a.parquet", "x")}); },
               {"a.parquet", "lacks the package pyarrow", "pip install"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
