#include <algorithm>
#include <set>

#include <nlohmann/json.hpp>

#include "twobp/config/section.h"
#include "twobp/core/check.h"
#include "twobp/models/decoder/config_file.h"

namespace twobp {
namespace {

using nlohmann::json;

constexpr const char* kSliding = "sliding_attention";
constexpr const char* kFull = "full_attention";
constexpr const char* kRotaryLayers = "no_rope_layers";  // 1 for layers that have it
constexpr const char* kRotaryInterval = "no_rope_layer_interval";

// The shortest list that repeats to `all`, perhaps not wholly the last time; empty if all are `usual`. The period is
// what remains of the length without the longest proper beginning that is also an end (Knuth, Morris and Pratt, SIAM J.
// Comput. 6, 1977).
std::vector<int> period_of(const std::vector<int>& all, int usual) {
  if (std::all_of(all.begin(), all.end(), [&](int one) { return one == usual; })) return {};
  std::vector<size_t> border(all.size() + 1, 0);  // of the first n entries
  for (size_t n = 1, length = 0; n < all.size(); ++n) {
    while (length > 0 && all[n] != all[length]) length = border[length];
    if (all[n] == all[length]) ++length;
    border[n + 1] = length;
  }
  const auto period = static_cast<std::ptrdiff_t>(all.size() - border.back());
  return {all.begin(), all.begin() + period};
}

std::vector<int> repeated(const std::vector<int>& list, int64_t layers, int usual) {
  std::vector<int> all;
  for (int64_t i = 0; i < layers; ++i) all.push_back(cyclic(list, i, usual));
  return all;
}

// sliding_window, or that of transformers if the key is missing; 0 for none.
int window_of(const DecoderFamily& family, const CheckedJson& file) {
  const auto found = file.object.find("sliding_window");
  const json value = found == file.object.end() ? json::parse(family.default_window) : *found;
  if (value.is_null()) return 0;
  TWOBP_CHECK(value.is_number_unsigned() && value <= INT32_MAX, file.origin, ": sliding_window is ", shown(value),
              ", not an integer from 1");
  TWOBP_CHECK(value > 0, file.origin,
              ": sliding_window is 0, so that a query would see no key: set it to 1 or more, or to null");
  return value.get<int>();
}

void check_layers(const CheckedJson& file, const char* key, size_t count, const DecoderOptions& o) {
  TWOBP_CHECK(count == static_cast<size_t>(o.layers), file.origin, ": ", key, " has ", count, " entries for ", o.layers,
              " layers");
}

// Whether each layer has the window, as layer_types says.
std::vector<bool> in_layer_types(const CheckedJson& file, const DecoderOptions& o) {
  const json& types = *file.find("layer_types");
  TWOBP_CHECK(types.is_array(), file.origin, ": layer_types is ", shown(types), ", not a list");
  check_layers(file, "layer_types", types.size(), o);
  std::vector<bool> windowed;
  for (const json& type : types) {
    TWOBP_CHECK(type == kSliding || type == kFull, file.origin, ": layer_types has ", shown(type),
                ", which is not supported: \"", kSliding, "\" and \"", kFull, "\" are");
    windowed.push_back(type == kSliding);
  }
  return windowed;
}

// Whether each layer has the window without layer_types.
std::vector<bool> by_default(const DecoderFamily& family, const CheckedJson& file, const DecoderOptions& o) {
  const int64_t first = family.windows == WindowsInFile::kSwitched ? file.integer("max_window_layers", 28) : 0;
  const int64_t pattern =
      family.windows == WindowsInFile::kAlternating ? file.integer("sliding_window_pattern", family.window_pattern) : 1;
  TWOBP_CHECK(pattern > 0, file.origin, ": sliding_window_pattern is 0, not a number of layers from 1");
  const std::vector<int> rotary = repeated(o.rope_layers, o.layers, 1);
  std::vector<bool> windowed;
  for (int64_t i = 0; i < o.layers; ++i) {
    switch (family.windows) {
      case WindowsInFile::kSwitched:
        windowed.push_back(i >= first);
        break;
      case WindowsInFile::kAlternating:
        windowed.push_back((i + 1) % pattern != 0);
        break;
      case WindowsInFile::kNotRotary:
        windowed.push_back(rotary[static_cast<size_t>(i)] == 0);
        break;
      default:
        windowed.push_back(true);
    }
  }
  return windowed;
}

void read_rotary_layers(const CheckedJson& file, DecoderOptions& o) {
  std::vector<int> rotary;
  if (file.find(kRotaryLayers)) {
    rotary = file.integers(kRotaryLayers);
    check_layers(file, kRotaryLayers, rotary.size(), o);
    for (int& turns : rotary) turns = turns != 0 ? 1 : 0;
  } else {
    const int64_t interval = file.integer(kRotaryInterval, 4);
    TWOBP_CHECK(interval > 0, file.origin, ": ", kRotaryInterval, " is 0, not a number of layers from 1");
    for (int64_t i = 0; i < o.layers; ++i) rotary.push_back((i + 1) % interval != 0 ? 1 : 0);
  }
  o.rope_layers = period_of(rotary, 1);
}

bool is_switched(const DecoderFamily& family) {
  return family.windows == WindowsInFile::kSwitched || family.windows == WindowsInFile::kNotRotary;
}

}  // namespace

std::vector<std::string> window_keys(const DecoderFamily& family) {
  switch (family.windows) {
    case WindowsInFile::kNone:
      return {};
    case WindowsInFile::kEvery:
      return {"sliding_window"};
    case WindowsInFile::kSwitched:
      return {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"};
    case WindowsInFile::kAlternating:
      return {"sliding_window", "sliding_window_pattern", "_sliding_window_pattern", "layer_types"};
    case WindowsInFile::kNotRotary:
      return {"sliding_window", "use_sliding_window", "layer_types", kRotaryLayers, kRotaryInterval};
  }
  return {};
}

void read_windows(const DecoderFamily& family, const CheckedJson& file, DecoderOptions& o) {
  // Before lists of that length are made.
  TWOBP_CHECK(o.layers <= static_cast<int64_t>(kMaxCount), file.origin, ": has ", o.layers,
              " layers, which are more than ", static_cast<int64_t>(kMaxCount));
  if (family.windows == WindowsInFile::kNotRotary) read_rotary_layers(file, o);
  o.windows.clear();
  if (family.windows == WindowsInFile::kNone) return;
  const bool on = !is_switched(family) || file.boolean("use_sliding_window", false);
  const bool listed = family.windows != WindowsInFile::kEvery && file.find("layer_types") != nullptr;
  const std::vector<bool> windowed = listed ? in_layer_types(file, o) : by_default(family, file, o);
  const int window = on ? window_of(family, file) : 0;
  std::vector<int> windows;
  for (const bool has : windowed) windows.push_back(has ? window : 0);
  o.windows = period_of(windows, 0);
}

void write_windows(const DecoderFamily& family, const DecoderOptions& o, json& out) {
  if (family.windows == WindowsInFile::kNone) return;
  const std::vector<int> windows = repeated(o.windows, o.layers, 0);
  const std::vector<int> rotary = repeated(o.rope_layers, o.layers, 1);
  const std::set<int> sizes(windows.begin(), windows.end());
  const int window = *sizes.rbegin();
  const bool every = family.windows == WindowsInFile::kEvery;
  TWOBP_CHECK(sizes.size() <= (every ? 1U : 2U) && (sizes.size() < 2 || *sizes.begin() == 0),
              "transformers knows one window", every ? " of all layers" : "", " in a ", family.name,
              ", but model.windows has others: give its layers that window", every ? "" : " or 0",
              ", to save the model");
  // Gemma's code makes masks with a window even if no layer has one.
  const bool needs_number = family.windows == WindowsInFile::kAlternating;
  out["sliding_window"] = window > 0 ? json(window) : needs_number ? json::parse(family.default_window) : json();
  if (every) return;
  json types = json::array();
  for (const int one : windows) types.push_back(one > 0 ? kSliding : kFull);
  out["layer_types"] = types;
  if (is_switched(family)) out["use_sliding_window"] = window > 0;
  if (family.windows == WindowsInFile::kNotRotary) {
    out[kRotaryLayers] = rotary;
    out.erase(kRotaryInterval);
  }
}

}  // namespace twobp
