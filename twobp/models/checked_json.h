// Reads, with checks, a JSON object from an untrusted source: the config.json of a Hugging Face directory and the
// objects in it. Every error names the file and the key.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace twobp {

// Formats a value for an error: short, on one line.
std::string shown(const nlohmann::json& value);

// A key that is null counts as missing, as in transformers. Throws Error if a required key is missing or a value has
// another type.
struct CheckedJson {
  const nlohmann::json& object;
  std::string origin;  // for messages: the file, and the place in it

  const nlohmann::json* find(const char* key) const;  // null: missing
  const nlohmann::json& require(const char* key) const;

  int64_t integer(const char* key) const;  // at least 0
  int64_t integer(const char* key, int64_t otherwise) const { return find(key) ? integer(key) : otherwise; }
  std::vector<int> integers(const char* key) const;  // each at least 0
  std::vector<double> numbers(const char* key) const;
  double number(const char* key) const;
  double number(const char* key, double otherwise) const { return find(key) ? number(key) : otherwise; }
  bool boolean(const char* key, bool otherwise) const;
  std::string text(const char* key, const std::string& otherwise) const;

  // For settings of which we support one value: throws Error unless the key is missing or has that value.
  void require_false(const char* key) const;
};

}  // namespace twobp
