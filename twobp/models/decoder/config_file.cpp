#include "twobp/models/decoder/config_file.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>
#include <type_traits>
#include <variant>

#include <nlohmann/json.hpp>

#include "twobp/config/section.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/models/models.h"

namespace twobp {
namespace {

using nlohmann::json;

constexpr const char* kRouterLogits = "output_router_logits";
constexpr const char* kPositions = "max_position_embeddings";

// The activations of transformers that are ours, the usual name of each first.
constexpr std::array<std::pair<const char*, const char*>, 6> kActivations = {{{"silu", "silu"},
                                                                              {"swish", "silu"},
                                                                              {"gelu", "gelu"},
                                                                              {"gelu_pytorch_tanh", "gelu_tanh"},
                                                                              {"gelu_new", "gelu_tanh"},
                                                                              {"gelu_fast", "gelu_tanh"}}};

// Keys of every model's file that do not change what it computes: names and versions, ids of tokens that only
// generation uses, outputs that a caller may ask for, settings of generation that early files have.
constexpr const char* kAnyModel =
    "architectures model_type dtype torch_dtype transformers_version _name_or_path _attn_implementation "
    "attn_implementation _commit_hash auto_map tokenizer_class task_specific_params finetuning_task problem_type "
    "id2label label2id num_labels use_cache cache_implementation return_dict output_attentions "
    "output_hidden_states bos_token_id eos_token_id pad_token_id sep_token_id initializer_range pretraining_tp "
    "chunk_size_feed_forward max_length min_length do_sample temperature top_k top_p typical_p num_beams "
    "num_beam_groups num_return_sequences diversity_penalty repetition_penalty length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size unsloth_version unsloth_fixed is_llama_config "
    "transformers.js_config max_sequence_length max_position_embeddings";

bool asks_for_nothing(const json& value) {
  // layer_types of a family without windows
  const auto full = [](const json& layer) { return layer == json("full_attention"); };
  if (value.is_array()) return std::all_of(value.begin(), value.end(), full);
  return value.is_null() || value == json(false) || (value.empty() && value.is_object()) || value == json("");
}

const Key& option_key(const std::string& option) {
  static const std::vector<Key> keys = decoder_keys();
  return *std::find_if(keys.begin(), keys.end(), [&](const Key& one) { return one.name == option; });
}

std::string activation_of(const CheckedJson& file, const char* key, const std::string& otherwise) {
  const std::string name = file.text(key, otherwise);
  for (const auto& [theirs, ours] : kActivations) {
    if (name == theirs) return ours;
  }
  std::vector<std::string> names;
  for (const auto& [theirs, ours] : kActivations) names.push_back(concat("\"", theirs, "\""));
  fail(file.origin, ": ", key, " ", shown(name), " is not supported: ", join(names), " are");
}

double from_file(FileForm form, double value) {
  if (form == FileForm::kInverse) return 1 / value;
  return form == FileForm::kInverseRoot ? 1 / std::sqrt(value) : value;
}

json to_file(const FileKey& key, double value) {
  if (key.form == FileForm::kOrNull && value == 0) return nullptr;
  if (key.form == FileForm::kInverse) return 1 / value;
  if (key.form != FileForm::kInverseRoot) return value;
  const double number = 1 / (value * value);
  const double whole = std::round(number);
  TWOBP_CHECK(std::abs(number - whole) < 1e-9 * number && whole <= INT32_MAX, "transformers wants an integer ",
              key.name, ", but it would be ", number, ": set model.", key.option, " to 1 / sqrt(", key.name,
              ") to save the model");
  return static_cast<int64_t>(whole);
}

json::const_iterator find_in(const CheckedJson& file, const FileKey& key) {
  const auto found = file.object.find(key.name);
  return found == file.object.end() && key.also != nullptr ? file.object.find(key.also) : found;
}

// The file with what transformers takes for the key if it is missing.
struct FileValue {
  json object = json::object();
  CheckedJson section;

  FileValue(const CheckedJson& file, const FileKey& key) : section{object, file.origin} {
    const auto found = find_in(file, key);
    if (found != file.object.end()) {
      object[key.name] = *found;
    } else if (key.otherwise != nullptr) {
      object[key.name] = json::parse(key.otherwise);
    }
  }
};

// Whether the key is null, there or by default.
bool is_null(const CheckedJson& file, const FileKey& key) {
  if (key.otherwise == nullptr) return false;  // reading it throws
  const auto found = find_in(file, key);
  return found != file.object.end() ? found->is_null() : json::parse(key.otherwise).is_null();
}

constexpr const char* kOneGroup = "greedy";
constexpr const char* kSomeGroups = "group_limited_greedy";

void read_limit(const CheckedJson& file, const FileKey& key, int64_t groups) {
  const std::string choice = file.text(key.name, kOneGroup);
  TWOBP_CHECK(choice == (groups > 1 ? kSomeGroups : kOneGroup) || (groups <= 1 && choice == kSomeGroups), file.origin,
              ": ", key.name, " ", shown(choice), " is not supported with ", groups, " groups of experts: \"",
              kOneGroup, "\" is with one, and \"", kSomeGroups, "\" with several");
}

void read_key(const CheckedJson& file, const FileKey& key, DecoderOptions& o) {
  const FileValue value(file, key);
  const CheckedJson& section = value.section;
  if (key.option == nullptr) {
    const json* given = section.find(key.name);
    const json wanted = json::parse(key.otherwise);
    const bool tanh = key.form == FileForm::kTanhGelu && given && *given == json("gelu");
    TWOBP_CHECK(!given || *given == wanted || tanh, file.origin, ": ", key.name, " ", shown(*given),
                " is not supported: ", shown(wanted), " is");
    return;
  }
  const bool null = is_null(file, key);
  std::visit(
      [&](auto* field) {
        using Value = std::remove_pointer_t<decltype(field)>;
        if constexpr (std::is_same_v<Value, int64_t>) {
          if (key.form == FileForm::kLimited) return read_limit(section, key, *field);
          *field = null ? 0 : section.integer(key.name);
          const bool zero = key.form == FileForm::kOrZero || find_in(file, key) == file.object.end();
          TWOBP_CHECK(null || *field > 0 || (*field == 0 && zero), file.origin, ": ", key.name, " ", *field,
                      " is not supported: an integer from 1 is");
        } else if constexpr (std::is_same_v<Value, double>) {
          const double number = null ? 0 : section.number(key.name);
          const bool above = key.form == FileForm::kInverse || key.form == FileForm::kInverseRoot;
          TWOBP_CHECK(number > 0 || !above, file.origin, ": ", key.name, " is ", number, ", not a number above 0");
          const bool with_logits = key.form == FileForm::kWithLogits;
          TWOBP_CHECK(number >= 0 || !with_logits, file.origin, ": ", key.name, " is ", number, ", below 0");
          *field = with_logits && !file.boolean(kRouterLogits, false) ? 0 : from_file(key.form, number);
          TWOBP_CHECK(*field > 0 || key.option != std::string("attention_scale"), file.origin, ": ", key.name, " is ",
                      number, ", not a number above 0");
        } else if constexpr (std::is_same_v<Value, bool>) {
          *field = section.boolean(key.name, false);
        } else if constexpr (std::is_same_v<Value, std::string>) {
          const json usual = json::parse(key.otherwise);
          *field = activation_of(section, key.name, usual.get<std::string>());
        } else {
          fail("model.", key.option, " is not read from config.json like this");
        }
      },
      option_key(key.option).field(&o));
}

// What the option's key says in the file.
json file_value(const FileKey& key, DecoderOptions& o, const json& before) {
  return std::visit(
      [&](auto* field) -> json {
        using Value = std::remove_pointer_t<decltype(field)>;
        if constexpr (std::is_same_v<Value, double>) {
          return to_file(key, *field);
        } else if constexpr (std::is_same_v<Value, int64_t>) {
          if (key.form == FileForm::kLimited) return *field > 1 ? kSomeGroups : kOneGroup;
          return key.form == FileForm::kOrNull && *field == 0 ? json() : json(*field);
        } else if constexpr (std::is_same_v<Value, std::string>) {
          for (const auto& [theirs, ours] : kActivations) {
            if (before == theirs && *field == ours) return before;
          }
          for (const auto& [theirs, ours] : kActivations) {
            if (*field == ours) return theirs;
          }
          return *field;
        } else if constexpr (std::is_same_v<Value, bool>) {
          return *field;
        } else {
          fail("model.", key.option, " is not written to config.json like this");
        }
      },
      option_key(key.option).field(&o));
}

void check_keys(const DecoderFamily& family, const CheckedJson& file) {
  const std::vector<std::string> any_model = split(kAnyModel, ' ');
  std::set<std::string> known(any_model.begin(), any_model.end());
  for (const FileKey& key : family.file) {
    known.insert(key.name);
    if (key.form == FileForm::kWithLogits) known.insert(kRouterLogits);
    if (key.also != nullptr) known.insert(key.also);
  }
  for (const std::string& key : rope_keys(family)) known.insert(key);
  for (const std::string& key : window_keys(family)) known.insert(key);
  known.insert(family.ignored.begin(), family.ignored.end());
  for (const auto& [key, value] : file.object.items()) {
    TWOBP_CHECK(known.contains(key) || asks_for_nothing(value), file.origin, ": ", printable(key.substr(0, 100)),
                " is ", shown(value), ", which is not supported with model_type \"", family.name,
                "\": remove it if it changes nothing of what the model computes");
  }
}

// The names in the file of the sizes of heads, for messages.
std::string file_name(const DecoderFamily& family, const std::string& option) {
  for (const FileKey& key : family.file) {
    if (key.option != nullptr && key.option == option) return key.name;
  }
  return "model." + option;
}

void check_sizes(const DecoderFamily& family, const CheckedJson& file, const DecoderOptions& given) {
  const auto name = [&](const char* option) { return file_name(family, option); };
  TWOBP_CHECK(given.heads > 0, file.origin, ": ", name("heads"), " is 0");
  TWOBP_CHECK(family.latent || given.head_dim > 0 || given.dim % given.heads == 0, file.origin, ": ", name("dim"), " ",
              given.dim, " is not divisible by ", name("heads"), " ", given.heads,
              has_option(family, "head_dim") ? ", and head_dim is not given" : "");
  const DecoderOptions o = filled_in(family, given);
  TWOBP_CHECK(o.kv_heads > 0 && o.heads % o.kv_heads == 0, file.origin, ": ", name("kv_heads"), " ", o.kv_heads,
              " does not divide ", name("heads"), " ", o.heads);
  TWOBP_CHECK(!family.latent || o.kv_heads == o.heads, file.origin, ": ", name("kv_heads"), " ", o.kv_heads,
              " is not supported: as many as ", name("heads"), ", ", o.heads, ", are");
  TWOBP_CHECK(o.hidden > 0, file.origin, ": ", name("hidden"), " is 0");
  const int64_t dims = rotary_dims(family, o);
  if (!family.rotary || (dims > 0 && dims % 2 == 0)) return;
  TWOBP_CHECK(!family.latent, file.origin, ": ", name("rope_dim"), " ", dims,
              " is not supported: it must be even, since the rotary embedding turns pairs");
  const std::string head = given.head_dim > 0 ? name("head_dim") : concat(name("dim"), " / ", name("heads"));
  if (o.rope_part == 1) {
    fail(file.origin, ": ", head, " ", o.head_dim,
         " is not supported: it must be even, since the rotary embedding turns pairs");
  }
  fail(file.origin, ": the rotary embedding turns ", dims, " of the ", o.head_dim, " features of a head (", family.part,
       " ", o.rope_part, "), which is not supported: it must be an even number, since it turns pairs");
}

}  // namespace

bool has_option(const DecoderFamily& family, const std::string& option) {
  if (option == "init_std") return true;
  if (option == "pad_token") return family.has_pad_token;
  if (option == "balance_rate") return !family.names.correction.empty();
  if (option == "windows") return family.windows != WindowsInFile::kNone;
  if (option == "rope_layers") return family.windows == WindowsInFile::kNotRotary;
  if (option == "rope_local_theta") return family.local_rope;
  if (option == "rope_mscale") return family.latent;
  if (option == "kv_heads" && family.latent) return false;  // as many as heads
  if (option == "rope_part") return family.part != nullptr;
  if (option == "rope_theta") return family.rotary;
  if (option == "rope_short" || option == "rope_long") return family.scales("longrope");
  for (const char* of_yarn :
       {"rope_low_freq", "rope_high_freq", "rope_beta_fast", "rope_beta_slow", "rope_whole_pairs"})
    if (option == of_yarn) return family.rotary && family.scales("yarn");
  const bool latent = option == "rope_dim" || option == "rope_interleaved";
  if (option.starts_with("rope_") && !latent) return family.rotary;
  return std::any_of(family.file.begin(), family.file.end(),
                     [&](const FileKey& key) { return key.option != nullptr && key.option == option; });
}

void read_decoder(const DecoderFamily& family, const CheckedJson& file, DecoderOptions& o) {
  check_keys(family, file);
  std::map<std::string, std::string> read;  // by option: the key
  for (const FileKey& key : family.file) {
    DecoderOptions changed = o;
    read_key(file, key, changed);
    if (key.option == nullptr) continue;
    const auto [first, is_new] = read.emplace(key.option, key.name);
    const FileKey one = {first->second.c_str(), key.option};
    TWOBP_CHECK(is_new || file_value(one, changed, {}) == file_value(one, o, {}), file.origin, ": ", key.name, " and ",
                first->second, " differ, which is not supported: make them equal");
    o = std::move(changed);
  }
  if (o.kv_heads == 0) o.kv_heads = o.heads;
  if (family.has_pad_token) o.pad_token = read_pad_token(file, o.vocab, family.default_pad_token);
  read_rope(family, file, o);
  read_windows(family, file, o);
  check_sizes(family, file, o);
  o = filled_in(family, o);
}

void write_decoder(const DecoderFamily& family, const DecoderOptions& given, int64_t sequence, json& out) {
  DecoderOptions o = filled_in(family, given);
  // A file has no word for 0, which follows from the heads.
  if (o.attention_scale == 0) o.attention_scale = 1 / std::sqrt(static_cast<double>(o.head_dim));
  TWOBP_CHECK(!family.equal_heads || o.dim % o.heads == 0, "transformers refuses a ", family.hf_class,
              " whose model.dim (", o.dim, ") is not divisible by model.heads (", o.heads,
              "), even with a model.head_dim: change one of them to save the model");
  const auto length = out.find(kPositions);
  if (length != out.end() && length->is_number_integer()) sequence = std::max(sequence, length->get<int64_t>());
  if (family.names.positions.empty()) out[kPositions] = sequence;
  std::map<std::string, const FileKey*> written;
  for (const FileKey& key : family.file) {
    if (key.option == nullptr) {
      out[key.name] = json::parse(key.otherwise);
      continue;
    }
    const auto before = out.find(key.name);
    if (key.form == FileForm::kWithLogits) {
      out[kRouterLogits] = o.balance_loss > 0;
      if (o.balance_loss == 0) continue;
    }
    const json value = file_value(key, o, before == out.end() ? json() : *before);
    const auto [first, is_new] = written.emplace(key.name, &key);
    TWOBP_CHECK(is_new || out[key.name] == value, "transformers has one setting, ", key.name, ", for model.",
                first->second->option, " and model.", key.option, " of a ", family.name,
                ": make them equal to save the model");
    out[key.name] = value;
    if (key.also != nullptr) out.erase(key.also);
  }
  write_rope(family, o, out);
  write_windows(family, o, out);
  if (family.has_pad_token) write_pad_token(o.pad_token, out);
}

}  // namespace twobp
