#include <array>
#include <cstdio>
#include <fstream>
#include <set>

#include <nlohmann/json.hpp>
#include <torch/version.h>

#include "twobp/config/settings.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/models/checked_json.h"
#include "twobp/nn/kernels/rows/operators.h"
#include "twobp/pipeline/memory/memory_meter.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/check_config.h"
#include "twobp/train/checkpoint/checkpoint_format.h"

namespace twobp {
namespace {

using nlohmann::json;

constexpr size_t kMostFacts = 3;   // facts that differ
constexpr size_t kMostShown = 60;  // characters of a value

std::string hexadecimal(uint32_t number) {
  std::array<char, 16> out{};
  std::snprintf(out.data(), out.size(), "%08x", static_cast<unsigned>(number));
  return out.data();
}

// A checksum of several texts. The end of each text counts too.
class Checksum {
 public:
  void add(const std::string& text) { crc_ = crc32_of(text.c_str(), text.size() + 1, crc_); }
  std::string text() const { return hexadecimal(crc_); }

 private:
  uint32_t crc_ = 0;
};

// Checksum of the running program: its code and everything that is linked into it.
std::string program_checksum() {
  std::ifstream file("/proc/self/exe", std::ios::binary);
  if (!file) return "unknown";
  uint32_t crc = 0;
  std::vector<char> block(1 << 20);
  while (file.read(block.data(), static_cast<std::streamsize>(block.size())), file.gcount() > 0) {
    crc = crc32_of(block.data(), static_cast<size_t>(file.gcount()), crc);
  }
  return hexadecimal(crc);
}

std::string shown(const std::string& value) {
  return value.size() <= kMostShown ? value : value.substr(0, kMostShown) + "...";
}

}  // namespace

Facts facts_of_program(const Config& config) {
  static const std::string program = program_checksum();
  Facts facts = {{"program", concat("twobp ", TWOBP_VERSION, ", checksum ", program)},
                 {"LibTorch", TORCH_VERSION},
                 {"CPU kernels", kernels_in_use(config.pipeline.device)}};
  for_each_key(config, [&facts](const std::string& name, const Key& key, void* values) {
    if (!key.per_process) facts.emplace_back(name, value_to_json(key, values));
  });
  return facts;
}

Facts facts_of_model(const ModelSpec& model, const ScheduleSource& schedule) {
  Checksum sum;
  int64_t numel = 0;
  std::set<std::string> known;
  for (const LayerSpec& spec : model.layers) {
    sum.add(spec.name);
    sum.add(spec.kind);
    const auto layer = spec.make();  // allocates nothing
    for (const Parameter* parameter : parameters_of(*layer)) {
      for (const ParameterPart& part : parameter->parts()) sum.add(concat(part.name, ' ', part.rows));
      sum.add(concat(at::IntArrayRef(parameter->sizes()), parameter->trainable() ? " trained" : " frozen"));
      if (known.insert(parameter->name()).second) numel += parameter->numel();
    }
  }
  Facts facts = {{"the model", concat(model.layers.size(), " layers, ", numel, " parameters, checksum ", sum.text())}};
  if (schedule.written() != nullptr) {
    Checksum cells;
    for (const auto& list : schedule.written()->ranks) {
      for (const Instruction& instruction : list) cells.add(to_string(instruction));
    }
    facts.emplace_back("the content of pipeline.schedule", concat("checksum ", cells.text()));
  }
  return facts;
}

Facts facts_of_data(const Config& config, const DataSplit& data) {
  Facts facts = {{"the training data", facts_of_run(config, *data.train).data}};
  if (data.held_out) facts.emplace_back("the held-out data", facts_of_run(config, *data.held_out).data);
  return facts;
}

void check_agreement(const Processes& processes, const Facts& facts) {
  if (processes.count() == 1) return;
  const std::vector<std::string> texts = processes.to_first(json(facts).dump());
  std::string error;
  if (processes.is_first()) {
    std::vector<std::string> differences;
    size_t count = 0;
    for (size_t i = 0; i < facts.size(); ++i) {
      for (size_t rank = 1; rank < texts.size(); ++rank) {
        const auto theirs = json::parse(texts[rank]).get<Facts>();
        const bool has = i < theirs.size() && theirs[i].first == facts[i].first;
        if (has && theirs[i].second == facts[i].second) continue;
        if (++count <= kMostFacts) {
          differences.push_back(concat(facts[i].first, " is ", shown(facts[i].second), " on rank 0, but ",
                                       has ? shown(theirs[i].second) : "not known", " on rank ", rank));
        }
        break;
      }
      // Another program may have other keys, so the remaining differences say nothing.
      if (i == 0 && count > 0) break;
    }
    if (count > kMostFacts) differences.push_back(concat("and ", count - kMostFacts, " more"));
    if (count > 0) {
      error = concat("the processes of this run disagree: ", join(differences, "; "),
                     ": start all of them with the same program, configuration and data");
    }
  }
  error = processes.from_first(error);
  if (!error.empty()) fail(error);
}

}  // namespace twobp
