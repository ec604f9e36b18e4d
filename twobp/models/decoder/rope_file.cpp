#include <algorithm>
#include <cmath>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/models/decoder/config_file.h"

namespace twobp {
namespace {

using nlohmann::json;

constexpr const char* kScaling = "rope_scaling";
constexpr const char* kParameters = "rope_parameters";
constexpr const char* kPart = "partial_rotary_factor";
constexpr const char* kLocalTheta = "rope_local_base_freq";
constexpr const char* kMostPositions = "max_position_embeddings";
constexpr const char* kOriginalPositions = "original_max_position_embeddings";

// Whole numbers without a decimal point, as transformers writes counts of positions.
json as_count(double value) {
  const bool whole = value == std::floor(value) && std::abs(value) < 0x1p53;
  return whole ? json(static_cast<int64_t>(value)) : json(value);
}

// An object within the file.
CheckedJson section_of(const CheckedJson& file, const char* key) {
  const json& value = *file.find(key);
  TWOBP_CHECK(value.is_object(), file.origin, ": ", key, " is ", shown(value), ", not an object");
  return {value, concat(file.origin, ": ", key)};
}

// Of 0.1 m ln(factor) + 1 for two m, as DeepSeek's files give it.
double attention_factor(const CheckedJson& rope, double factor) {
  const double given = rope.number("attention_factor", 0);
  const double m = rope.number("mscale", 0);
  const double m_all = rope.number("mscale_all_dim", 0);
  if (given > 0 || m == 0 || m_all == 0) return given;
  const auto of = [&](double scale) { return factor <= 1 ? 1 : 0.1 * scale * std::log(factor) + 1; };
  return of(m) / of(m_all);
}

// The original positions lie beside the object, where transformers takes them from. Without a factor, their ratio to
// the most positions is one.
void read_longrope(const CheckedJson& file, const CheckedJson& rope, DecoderOptions& o,
                   std::vector<std::string>& known) {
  o.rope_original_positions = file.number(kOriginalPositions, 4096);
  if (o.rope_factor == 0) o.rope_factor = file.number(kMostPositions, 4096) / o.rope_original_positions;
  o.rope_attention_factor = rope.number("attention_factor", 0);
  o.rope_short = rope.numbers("short_factor");
  o.rope_long = rope.numbers("long_factor");
  known.insert(known.end(), {"short_factor", "long_factor", "attention_factor", kOriginalPositions});
}

void read_scaling(const DecoderFamily& family, const CheckedJson& file, const CheckedJson& rope, DecoderOptions& o) {
  const std::string type = rope.text("rope_type", rope.text("type", "default"));
  std::vector<std::string> known = {"rope_type", "type", "rope_theta"};
  if (family.part != nullptr) known.emplace_back(kPart);
  std::vector<std::string> supported = {"default"};
  supported.insert(supported.end(), family.scalings.begin(), family.scalings.end());
  TWOBP_CHECK(std::find(supported.begin(), supported.end(), type) != supported.end(), rope.origin, ": rope_type ",
              shown(type), " is not supported: ", join(supported), " are");
  if (type != "default") {
    o.rope_scaling = type;
    o.rope_factor = type == "longrope" && !rope.find("factor") ? 0 : rope.number("factor");  // 0: see below
    known.emplace_back("factor");
  }
  if (type == "llama3" || type == "yarn") {
    const bool given = rope.find(kOriginalPositions) != nullptr || !file.find(kMostPositions);
    o.rope_original_positions = given ? rope.number(kOriginalPositions) : file.number(kMostPositions);
    known.emplace_back(kOriginalPositions);
  }
  if (type == "longrope") read_longrope(file, rope, o, known);
  if (type == "dynamic") o.rope_original_positions = file.number(kMostPositions);
  if (type == "llama3") {
    o.rope_low_freq = rope.number("low_freq_factor");
    o.rope_high_freq = rope.number("high_freq_factor");
    known.insert(known.end(), {"low_freq_factor", "high_freq_factor"});
    TWOBP_CHECK(o.rope_low_freq < o.rope_high_freq, rope.origin, ": low_freq_factor must be below high_freq_factor");
  }
  if (type == "yarn") {
    const DecoderOptions usual;
    o.rope_beta_fast = rope.number("beta_fast", usual.rope_beta_fast);
    o.rope_beta_slow = rope.number("beta_slow", usual.rope_beta_slow);
    o.rope_attention_factor = attention_factor(rope, o.rope_factor);
    if (family.latent) o.rope_mscale = rope.number("mscale_all_dim", 0);
    known.insert(known.end(), {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"});
    o.rope_whole_pairs = rope.boolean("truncate", true);
  }
  for (const auto& [key, value] : rope.object.items()) {
    const bool asks = !value.is_null() && std::find(known.begin(), known.end(), key) == known.end();
    TWOBP_CHECK(!asks || (key == kPart && value == json(1)), rope.origin, ": ", printable(key), " ", shown(value),
                " is not supported with rope_type ", shown(type));
  }
}

// Whether transformers takes the key for missing.
bool is_empty(const CheckedJson& file, const char* key) {
  const json* found = file.find(key);
  return found == nullptr || found->empty() || *found == json(false) || *found == json("");
}

// Gemma 3's files have an object for each of two types of layers. `rope_scaling` changes that of full attention key by
// key, so that its old name "type" loses against a rope_type that is there or is the default. Other keys of
// rope_parameters are not read.
void read_rope_of_layers(const DecoderFamily& family, const CheckedJson& file, DecoderOptions& o) {
  json full = {{"rope_type", "default"}};
  std::string origin = file.origin;
  if (!is_empty(file, kParameters)) {
    const CheckedJson both = section_of(file, kParameters);
    if (both.find("full_attention")) {
      const CheckedJson given = section_of(both, "full_attention");
      full = given.object;
      origin = given.origin;
    }
    if (both.find("sliding_attention")) {
      const CheckedJson local = section_of(both, "sliding_attention");
      const std::string type = local.text("rope_type", local.text("type", "default"));
      TWOBP_CHECK(type == "default", local.origin, ": rope_type ", shown(type), " is not supported: default is");
      o.rope_local_theta = local.number("rope_theta", o.rope_local_theta);
    }
  }
  if (!is_empty(file, kScaling)) {
    const CheckedJson scaling = section_of(file, kScaling);
    full.update(scaling.object);
    origin = scaling.origin;
  }
  const CheckedJson rope{full, origin};
  o.rope_theta = rope.number("rope_theta", o.rope_theta);
  read_scaling(family, file, rope, o);
}

}  // namespace

std::vector<std::string> rope_keys(const DecoderFamily& family) {
  std::vector<std::string> keys = {kScaling, kParameters, "rope_theta", family.theta};
  if (family.part != nullptr) keys.insert(keys.end(), {kPart, family.part});
  if (family.local_rope) keys.emplace_back(kLocalTheta);
  if (family.scales("longrope")) keys.emplace_back(kOriginalPositions);
  return keys;
}

void read_rope(const DecoderFamily& family, const CheckedJson& file, DecoderOptions& o) {
  if (!family.rotary) return;
  const DecoderOptions usual;
  o.rope_theta = file.number(family.theta, family.default_theta);
  o.rope_local_theta = file.number(kLocalTheta, usual.rope_local_theta);
  o.rope_part = family.part == nullptr ? 1 : file.number(family.part, family.default_part);
  if (family.local_rope) return read_rope_of_layers(family, file, o);
  // If both have keys, transformers 5 uses the first.
  const char* key = is_empty(file, kScaling) ? kParameters : kScaling;
  const bool none = is_empty(file, key);
  if (none && family.default_rope == nullptr) return;
  const json without = none ? json::parse(family.default_rope) : json();
  const CheckedJson rope = none ? CheckedJson{without, file.origin} : section_of(file, key);
  o.rope_theta = rope.number("rope_theta", o.rope_theta);
  if (family.part != nullptr) o.rope_part = rope.number(kPart, o.rope_part);
  read_scaling(family, file, rope, o);
}

void write_rope(const DecoderFamily& family, const DecoderOptions& o, json& out) {
  if (!family.rotary) return;
  out.erase(kParameters);  // a synonym of the keys below
  out[family.theta] = o.rope_theta;
  if (family.part != nullptr) out[family.part] = o.rope_part;
  if (family.local_rope) out[kLocalTheta] = o.rope_local_theta;
  json& rope = out[kScaling];
  rope = nullptr;
  if (o.rope_scaling == "none") {
    if (family.default_rope != nullptr) rope = {{"rope_type", "default"}};
    return;
  }
  rope = {{"rope_type", o.rope_scaling}, {"factor", o.rope_factor}};
  if (o.rope_scaling == "llama3" || o.rope_scaling == "yarn")
    rope[kOriginalPositions] = as_count(o.rope_original_positions);
  if (o.rope_scaling == "longrope") {
    out[kOriginalPositions] = rope[kOriginalPositions] = as_count(o.rope_original_positions);
    rope.update({{"short_factor", o.rope_short}, {"long_factor", o.rope_long}});
  }
  if (o.rope_scaling == "dynamic") out[kMostPositions] = as_count(o.rope_original_positions);
  if (o.rope_scaling == "llama3")
    rope.update({{"low_freq_factor", o.rope_low_freq}, {"high_freq_factor", o.rope_high_freq}});
  if (o.rope_scaling == "yarn") {
    rope.update({{"beta_fast", o.rope_beta_fast}, {"beta_slow", o.rope_beta_slow}, {"truncate", o.rope_whole_pairs}});
    if (o.rope_mscale > 0) rope["mscale_all_dim"] = o.rope_mscale;
  }
  if (o.rope_attention_factor > 0) rope["attention_factor"] = o.rope_attention_factor;
}

}  // namespace twobp
