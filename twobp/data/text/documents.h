// Documents in files: a plain text file is one; the lines of a .jsonl or .ndjson file and the rows of a
// .parquet file are one each.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "twobp/files/input_file.h"

namespace twobp {

struct Document {
  std::string text;  // or, of a chat, the list of its messages as JSON
  bool chat = false;
  std::string origin;      // "texts.jsonl:17", for messages
  std::string tools = {};  // of a chat: the list of tools that its assistant may call, as JSON; empty: none
};

// Whether the name ends in .jsonl, .ndjson or .parquet, in any case, so that documents are in a field of its
// records.
bool has_records(const std::string& file);

// Calls visit(document) for every document of the files, in order. `field`: the field of the records with the
// text, or with the messages of a chat, whose tools are in the field "tools": a list, or its JSON as a text.
// Blank lines are skipped. Parquet is read by Python's package pyarrow. Throws Error for a file that cannot
// be read, a text that check_text refuses, a line that is no JSON object, and a record without the field or
// with something else in one of these (file and line named).
void for_each_document(const std::vector<std::string>& files, const std::string& field,
                       const std::function<void(const Document&)>& visit);

// Checks that a file is a text before it is read as one, byte by byte or by a tokenizer.
// Throws Error that says what to do for a file of a known other format, by its first bytes.
void check_no_other_format(const InputFile& file);

// Throws Error for a file that is no text: of another format, or with bytes that are not UTF-8 or are zero.
// The error names the first such byte.
void check_text(const InputFile& file);

}  // namespace twobp
