// The promise on which the whole design rests, as one matrix. For each model, its batches and settings, losses,
// gradient norms and weights after a few steps are the same to the bit in every way to run the steps: schedule, p2
// policy, cut of the layers, ranks, memory cap, recomputation. The reference is itself a run of this library.
// autograd_test and the tests against transformers show that it learns the same as others.
#include <algorithm>
#include <cctype>
#include <cmath>
#include <functional>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include "tests/every_way.h"
#include "tests/expect_error.h"
#include "tests/train/bert_batches.h"
#include "tests/train/family_config.h"
#include "tests/train/resnet_training.h"
#include "tests/train/ways.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/schedule/named_schedules.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::every;
using test::of_split;
using test::operator+;
using test::Outcome;
using test::Splits;
using test::under_caps;
using test::Way;
using Make = std::function<std::vector<Batch>(const Config&)>;
using Change = std::function<void(Config&)>;

struct Row {
  std::string name;
  Config config;
  Make batches;
  std::vector<Way> ways;
  std::vector<Change> others{};  // settings that give other losses
  std::vector<Make> unlike{};    // batches that do
};

// Every eighteenth way, others in each row.
std::vector<Way> sample(const Row& row) {
  if (test::every_way()) return row.ways;
  std::vector<Way> ways;
  for (size_t i = std::hash<std::string>()(row.name) % 18; i < row.ways.size(); i += 18) ways.push_back(row.ways[i]);
  return ways.empty() ? std::vector<Way>{row.ways.back()} : ways;
}

class SameBits : public ::testing::TestWithParam<Row> {};

TEST_P(SameBits, InEveryWay) {
  const Row& row = GetParam();
#ifdef __SANITIZE_THREAD__
  if (row.config.pipeline.threads > 1)
    GTEST_SKIP() << "ThreadSanitizer does not see the barriers of the OpenMP inside LibTorch";
#endif
  const auto batches = row.batches(row.config);
  const Outcome expected = test::train(row.config, batches, Way());
  for (const double loss : expected.losses) EXPECT_TRUE(std::isfinite(loss));
  const std::set<double> losses(expected.losses.begin(), expected.losses.end());
  EXPECT_EQ(losses.size(), batches.size()) << "a step repeats another's loss";
  const auto differs = [&](const Outcome& other) {
    return !test::same_bits(expected.losses, other.losses) || !test::same_bits(expected.norms, other.norms);
  };
  for (size_t i = 0; i < row.others.size(); ++i) {
    Config config = row.config;
    row.others[i](config);
    EXPECT_TRUE(differs(test::train(config, batches, Way()))) << "setting " << i;
  }
  for (size_t i = 0; i < row.unlike.size(); ++i)
    EXPECT_TRUE(differs(test::train(row.config, row.unlike[i](row.config), Way()))) << "batches " << i;
  test::expect_same_bits(expected, row.config, batches, sample(row));
}

Make random(int steps, int micro_batches) {
  return [=](const Config& config) {
    return config.model.type.name() == "resnet" ? test::image_batches(config, steps, micro_batches)
                                                : test::random_batches(steps, micro_batches);
  };
}

Make padded(int steps, int micro_batches) {
  return [=](const Config&) { return test::padded(test::random_batches(steps, micro_batches)); };
}

Make of_bert(int steps, int micro_batches, const std::string& without = "") {
  return [=](const Config&) { return test::bert_batches(steps, micro_batches, without); };
}

// The last batch of an epoch has fewer micro-batches, and its last micro-batch has fewer samples.
std::vector<Batch> smaller_at_the_end(const Config&) {
  return {test::random_batch(4, 2, 2, 1), test::random_batch(2, 2, 1, 2), test::random_batch(4, 2, 2, 3),
          test::random_batch(1, 1, 1, 4), test::random_batch(4, 2, 1, 5)};
}

// Some splits are even and some are not, some stages end inside a block, and some have one layer.
const Splits kSplits = {{8}, {4, 4}, {3, 5}, {3, 2, 3}, {1, 2, 1, 3, 1}, {1, 1, 1, 4, 1}};
const Splits kMambaSplits = {{10}, {4, 6}, {1, 8, 1}, {3, 3, 2, 2}, {2, 1, 2, 1, 3, 1}};
const Splits kResnetSplits = {{6}, {3, 3}, {1, 4, 1}, {2, 1, 2, 1}, {1, 1, 1, 1, 1, 1}};

Config llama(bool tied, double clip_norm) {
  Config config = test::tiny_config();
  test::llama_of(config).tied = tied;
  config.train.clip_norm = clip_norm;
  return config;
}

Config bert(bool tied, double dropout = 0.2) {
  Config config = llama(tied, 0.5);
  test::make_bert(config, test::kSequence, dropout);
  return config;
}

// The 260 channels make two groups in the scan.
Config mamba(bool tied) {
  Config config = llama(tied, 0.5);
  MambaOptions& options = test::make_mamba(config);
  options.dim = 130;
  options.layers = 4;
  options.state = 5;
  return config;
}

Config with(Config config, const Change& change) {
  change(config);
  return config;
}

Change threads(int count) {
  return [=](Config& config) { config.pipeline.threads = count; };
}
Change precision(const char* type) {
  return [=](Config& config) { config.train.precision = type; };
}
Change adapters(const std::vector<std::string>& targets) {
  return [=](Config& config) {
    config.model.lora = 3;
    config.model.lora_targets = targets;
  };
}
Change slices(const std::vector<int>& lengths) {
  return [=](Config& config) {
    config.pipeline.slices = static_cast<int>(lengths.size());
    config.pipeline.slice_lengths = lengths;
  };
}

std::vector<Row> llamas() {
  std::vector<Row> rows;
  const Change tie = [](Config& c) { test::llama_of(c).tied = !test::llama_of(c).tied; };
  const Change unclip = [](Config& c) { c.train.clip_norm = c.train.clip_norm > 0 ? 0 : 0.5; };
  for (const bool tied : {false, true}) {
    for (const double clip_norm : {0.0, 0.5}) {
      for (const int m : {1, 2, 3, 4}) {
        rows.push_back({concat(tied ? "Tied" : "Untied", clip_norm > 0 ? "Clipped" : "Unclipped", "M", m),
                        llama(tied, clip_norm), random(3, m), every(kSplits)});
        if (m == 2) rows.back().others = {tie, unclip}, rows.back().unlike = {random(3, 3)};
      }
    }
    rows.push_back({tied ? "TiedSmallerLast" : "SmallerLast", llama(tied, 0.5), smaller_at_the_end, every(kSplits)});
  }
  rows.push_back({"Capped", llama(true, 0.5), random(3, 4), under_caps(every({{3, 2, 3}}), 100'000)});
  rows.push_back({"Padded", llama(true, 0.5), padded(3, 3), every(kSplits, {"1f1b"}), {}, {random(3, 3)}});
  rows.push_back({"Threads", with(llama(true, 0.5), threads(2)), random(3, 3), every({{3, 2, 3}}, {"1f1b"})});
  // A split by measured cost depends on the clock, but the result must not.
  std::vector<Way> measured;
  for (const int stages : {2, 3, 5, 8}) measured.push_back({"1f1b", P2Policy::kFill, stages});
  rows.push_back({"MeasuredSplit", llama(false, 0), random(3, 2), measured});
  for (const char* type : {"bf16", "fp16"}) {
    for (const bool tied : {false, true}) {
      rows.push_back({concat(type, tied ? "Tied" : ""),
                      with(llama(tied, 0.5), precision(type)),
                      random(3, 3),
                      every({{8}, {4, 4}, {3, 2, 3}, {1, 2, 1, 3, 1}}, test::kPlainSchedules,
                            {P2Policy::kOff, P2Policy::kEnd, P2Policy::kFill}),
                      {precision("fp32")}});
    }
  }
  for (const char* type : {"sgd", "adamw"}) {
    const Change freeze = [=](Config& c) {
      c.optimizer.type = type;
      c.model.freeze = {"model.embed_tokens.weight", "model.layers.0.*", "model.layers.1.self_attn.*"};
    };
    rows.push_back({concat("Frozen_", type), with(llama(false, 0.5), freeze), random(3, 3),
                    every({{8}, {4, 4}, {3, 2, 3}, {1, 2, 1, 3, 1}, {1, 1, 1, 1, 1, 1, 1, 1}}, test::kPlainSchedules,
                          {P2Policy::kOff, P2Policy::kCooldown, P2Policy::kFill})});
  }
  for (const char* type : {"fp32", "bf16"}) {
    const Change muon = [=](Config& c) {
      c.optimizer.type = "muon";
      c.train.precision = type;
    };
    rows.push_back({concat("Muon_", type),
                    with(llama(false, 0.5), muon),
                    random(3, 3),
                    every({{4, 4}, {3, 2, 3}, {1, 2, 1, 3, 1}}, {"1f1b", "gpipe"}, {P2Policy::kFill}),
                    {[](Config& c) { c.optimizer.type = "adamw"; }}});
  }
  rows.push_back({"Adapters",
                  with(llama(false, 0), adapters({"q_proj", "v_proj", "down_proj"})),
                  random(4, 2),
                  every({{4, 4}, {3, 2, 3}, {1, 2, 1, 3, 1}}, {"1f1b"}, {P2Policy::kFill}),
                  {[](Config& c) { c.model.lora = 2; }}});
  return rows;
}

// Sequences in slices, by all schedules that take them. `auto` is searched for.
std::vector<Row> sliced() {
  std::vector<Row> rows;
  const std::vector<P2Policy> two = {P2Policy::kOff, P2Policy::kFill};
  for (const std::vector<int>& lengths : {std::vector<int>{5, 11}, {4, 1, 3, 8}}) {
    for (const int m : {1, 3}) {
      std::vector<Way> ways =
          every({{3, 2, 3}}, {"naive", "gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2"}) +
          every({{3, 5}}, {"zb-h1", "zb-h2"}, {P2Policy::kPlaced}) +
          every({{2, 2, 1, 3}}, {"zb-v", "v-half", "v-min", "interleaved-1f1b", "interleaved-zb", "looped-bfs"}, two,
                2) +
          under_caps(every({{3, 5}}, {"1f1b"}, {P2Policy::kFill}), 20'000);
      if (m == 3) {
        ways = ways + every({{3, 5}, {2, 2, 1, 3}}, {"auto"}, {P2Policy::kFill}, 2) +
               every({{3, 2, 3}}, {"auto"}, {P2Policy::kFill}, 3);
      }
      rows.push_back({concat(lengths.size(), "SlicesM", m),
                      with(llama(false, 0.5), slices(lengths)),
                      random(3, m),
                      ways,
                      {slices({8, 8})}});
      rows.back().config.pipeline.micro_batches = m;
    }
  }
  return rows;
}

std::vector<Row> others() {
  std::vector<Row> rows;
  for (const bool tied : {false, true}) {
    for (const int m : {1, 3}) {
      rows.push_back({concat(tied ? "Tied" : "", "BertM", m), bert(tied), of_bert(3, m), every(kSplits)});
      rows.push_back({concat(tied ? "Tied" : "", "MambaM", m), mamba(tied), random(3, m), every(kMambaSplits)});
    }
  }
  rows.push_back({"BertFields",
                  bert(true),
                  of_bert(3, 2),
                  every({{3, 5}}, {"1f1b"}),
                  {[](Config& c) { c.model.type.as<BertOptions>().dropout = 0; },
                   [](Config& c) { c.model.type.as<BertOptions>().attention_dropout = 0; },
                   [](Config& c) { c.model.type.as<BertOptions>().tied = false; }, [](Config& c) { c.train.seed = 8; }},
                  {of_bert(3, 2, "attention_mask"), of_bert(3, 2, "token_type_ids")}});
  rows.push_back({"BertAdapters", with(bert(true), adapters({"query", "value", "output.dense"})), of_bert(3, 2),
                  every({{3, 5}}, {"gpipe", "1f1b"}, {P2Policy::kOff, P2Policy::kFill})});
  rows.push_back({"MambaPadded", mamba(true), padded(3, 3), every(kMambaSplits, {"1f1b"}), {}, {random(3, 3)}});
  rows.push_back({"MambaCapped", mamba(true), random(3, 4), under_caps(every({{4, 4, 2}}, {"1f1b"}), 400'000)});
  // The scan and the convolution give the same bits for any number of threads. A GEMM of the library may not.
  rows.push_back({"MambaThreads", with(mamba(true), threads(2)), random(3, 3), every({{4, 4, 2}}, {"1f1b"})});
  rows.push_back({"MambaAdapters", with(mamba(true), adapters({"in_proj", "x_proj", "out_proj"})), random(2, 2),
                  every({{4, 6}}, {"1f1b"}, {P2Policy::kFill})});
  for (const std::string block : {"bottleneck", "basic"}) {
    for (const int m : {1, 3})
      rows.push_back({concat(block, "ResnetM", m), test::tiny_resnet(block), random(3, m), every(kResnetSplits)});
  }
  for (const int count : {1, 2}) {
    rows.push_back({concat("ResnetCappedThreads", count), with(test::tiny_resnet("bottleneck"), threads(count)),
                    random(2, 4), under_caps(every({{2, 2, 2}}, {"1f1b"}, {P2Policy::kFill}), 60'000)});
  }
  const Change bf16_stash = [](Config& c) { c.pipeline.stash = "bf16"; };
  const Change full_stash = [](Config& c) { c.pipeline.stash = "full"; };
  rows.push_back({"Bf16Stash",
                  with(llama(true, 0), bf16_stash),
                  random(3, 3),
                  every({{8}, {3, 5}, {3, 2, 3}}, {"1f1b"}) +
                      test::streamed(every({{8}, {3, 5}}, {"1f1b"}, {P2Policy::kEnd, P2Policy::kFill})),
                  {full_stash}});
  rows.push_back({"ResnetBf16Stash",
                  with(test::tiny_resnet("bottleneck"), bf16_stash),
                  random(3, 3),
                  every({{3, 3}}, {"1f1b"}),
                  {full_stash}});
  // The stem of Hugging Face's models.
  rows.push_back({"ResnetPooled", test::tiny_resnet("basic", /*small_images=*/false), random(2, 2),
                  every({{3, 3}}, {"1f1b"}, {P2Policy::kFill})});
  return rows;
}

// Every named schedule on its own placement of stages. The number of micro-batches is below, equal to, above and far
// above the number of ranks. It is even or odd.
const std::vector<std::pair<int, int>> kSizes = {{1, 3}, {2, 1}, {2, 2}, {2, 4}, {2, 5}, {3, 2},
                                                 {3, 3}, {3, 7}, {4, 3}, {4, 4}, {4, 8}};

int stages_of(const std::string& schedule, int ranks) {
  return usual_stages_per_rank(named_schedule(schedule).placement) * ranks;
}

std::vector<Row> schedules() {
  std::vector<Row> rows;
  for (const std::string& name : schedule_names()) {
    std::string letters = name;
    std::replace_if(
        letters.begin(), letters.end(), [](char c) { return std::isalnum(c) == 0; }, '_');
    std::map<int, std::vector<Way>> ways;
    for (const auto& [ranks, m] : kSizes) {
      const int stages = stages_of(name, ranks);
      for (const P2Policy policy : policies_of(name)) ways[m].push_back({name, policy, stages, {}, ranks});
    }
    for (const auto& [m, some] : ways) rows.push_back({concat(letters, "_M", m), llama(true, 0.5), random(2, m), some});
  }
  std::vector<Way> searched;
  for (const auto& [stages, ranks] : {std::pair{2, 2}, std::pair{4, 2}, std::pair{4, 1}}) {
    for (const MemoryCap& cap : {MemoryCap::automatic(), MemoryCap::none()})
      searched.push_back({"auto", P2Policy::kFill, stages, {}, ranks, cap});
  }
  rows.push_back(
      {"Searched", with(llama(false, 0), [](Config& c) { c.pipeline.micro_batches = 4; }), random(2, 4), searched});
  return rows;
}

// Each mode for the blocks, and each mode for every layer; `mixed`: neighbouring layers with all modes.
std::vector<Way> recomputed(const Splits& splits, const std::vector<std::string>& mixed,
                            const std::vector<std::string>& schedules = {"1f1b"},
                            const std::vector<P2Policy>& policies = {P2Policy::kOff, P2Policy::kEnd, P2Policy::kFill}) {
  std::vector<Way> ways;
  for (const std::vector<std::string>& modes : {std::vector<std::string>{"activations"},
                                                {"derivatives"},
                                                {"both"},
                                                {"*=activations"},
                                                {"*=derivatives"},
                                                {"*=both"},
                                                mixed}) {
    for (Way way : every(splits, schedules, policies)) {
      way.recompute = modes;
      ways.push_back(way);
    }
  }
  return ways;
}

std::vector<Row> recomputing() {
  const std::vector<std::string> by_layer = {"both", "*1*=activations", "*2*=derivatives"};
  // The modes of stages.0.layers.0 to stages.1.layers.1 are derivatives, both, derivatives and activations.
  const std::vector<std::string> by_block = {"both", "*.stages.1.*=activations", "*.layers.0=derivatives"};
  const Config small_mamba = with(test::tiny_config(), [](Config& c) {
    test::llama_of(c).dim = 64;
    test::make_mamba(c).state = 5;
  });
  const Change freeze = [](Config& c) {
    c.model.freeze = {"model.embed_tokens.*", "model.layers.0.*", "*.1.self_attn.*", "*.2.mlp.*",
                      "*.input_layernorm.weight"};
  };
  const Splits two = {{4, 4}};
  std::vector<Row> rows = {
      {"Llama", llama(false, 0), random(2, 3), recomputed({{8}, {3, 5}, {3, 2, 3}}, by_layer)},
      {"Capped", llama(false, 0), random(2, 4),
       under_caps(recomputed({{8}, {3, 2, 3}}, by_layer, {"gpipe", "1f1b"}, test::kAnyPolicies), 50'000)},
      {"TiedLlama", llama(true, 0.5), random(2, 3), recomputed({{8}, {2, 3, 3}}, by_layer)},
      {"Bert", bert(false), random(2, 3), recomputed({{8}, {3, 5}, {3, 2, 3}}, by_layer)},
      {"Mamba", small_mamba, random(2, 3), recomputed({{8}, {4, 4}, {2, 4, 2}}, by_layer)},
      {"Resnet", test::tiny_resnet("bottleneck"), random(2, 3), recomputed({{6}, {3, 3}, {2, 2, 2}}, by_block)},
      {"BasicResnet", test::tiny_resnet("basic", false), random(2, 3), recomputed({{6}, {1, 2, 3}}, by_block)},
      {"Adapters", with(llama(false, 0), adapters({"q_proj", "v_proj", "down_proj"})), random(2, 3),
       recomputed(two, by_layer)},
      {"Frozen", with(llama(false, 0), freeze), random(2, 3), recomputed(two, by_layer)}};
  for (const char* type : {"bf16", "fp16"})
    rows.push_back({type, with(llama(false, 0), precision(type)), random(2, 3), recomputed(two, by_layer)});
  for (Row& row : rows) row.name += "Recomputed";
  return rows;
}

// Every family of decoders, with its features: windows on some layers, which are shorter than the sequence, layers
// without rotary embedding, caps, multipliers.
std::vector<Row> families() {
  std::vector<Row> rows;
  for (const DecoderFamily& family : decoder_families()) {
    const Config config = test::family_config(family);
    Way recomputed{"1f1b", P2Policy::kEnd, 2};
    recomputed.recompute = {"both"};
    rows.push_back({family.name,
                    config,
                    padded(2, 3),
                    {{"1f1b", P2Policy::kFill, 2},
                     of_split("1f1b", P2Policy::kCooldown, {2, 3, 1, 2}),  // between the halves of a block
                     recomputed}});
    recomputed.stages = 3;
    recomputed.policy = P2Policy::kFill;
    if (family.latent) {
      rows.push_back({family.name + "Slices",
                      with(config, slices({5, 11})),
                      random(2, 3),
                      {{"1f1b", P2Policy::kFill, 2}, of_split("zb-h1", P2Policy::kFill, {2, 3, 1, 2})},
                      {slices({8, 8})}});
    }
    const bool drops = has_option(family, "dropout");
    const Change undrop = [=](Config& c) {
      test::llama_of(c).attention_dropout = 0;
      if (drops) test::llama_of(c).dropout = 0;
    };
    rows.push_back({family.name + "Dropout",
                    with(config,
                         [=](Config& c) {
                           test::llama_of(c).attention_dropout = 0.2;
                           if (drops) test::llama_of(c).dropout = 0.1;
                         }),
                    padded(2, 3),
                    {recomputed},
                    {undrop}});
  }
  return rows;
}

// Gradients that are applied layer by layer at the end of the step, and freed.
std::vector<Row> streaming() {
  const auto ways = [](const Splits& splits) {
    return test::streamed(every(splits) + every({{2, 2, 1, 3}}, {"zb-v", "interleaved-1f1b"}, {P2Policy::kFill}, 2) +
                          under_caps(every({{3, 2, 3}}, {"1f1b"}, {P2Policy::kFill}), 50'000));
  };
  const auto in_two = test::streamed(every({{8}, {3, 5}}, {"gpipe", "1f1b"}, {P2Policy::kEnd, P2Policy::kFill}));
  std::vector<Row> rows;
  for (const bool tied : {false, true}) {
    for (const int m : {1, 3, 4})
      rows.push_back({concat(tied ? "Tied" : "", "LlamaM", m), llama(tied, 0), random(3, m), ways(kSplits)});
    rows.push_back({tied ? "TiedSmallerLast" : "SmallerLast", llama(tied, 0), smaller_at_the_end, ways(kSplits)});
  }
  for (const std::string type : {"adam", "sgd", "momentum", "muon", "average"}) {
    const Change change = [=](Config& c) {
      c.optimizer.type = type == "momentum" ? "sgd" : type == "average" ? "adamw" : type;
      if (type == "momentum") c.optimizer.momentum = 0.9;
      if (type == "average") c.optimizer.average = 0.5;
    };
    rows.push_back({type, with(llama(true, 0), change), random(3, 3), in_two});
  }
  rows.push_back({"bf16", with(llama(true, 0), precision("bf16")), random(3, 3), in_two});
  rows.push_back(
      {"Adapters", with(llama(false, 0), adapters({"q_proj", "v_proj", "down_proj"})), random(3, 2), in_two});
  rows.push_back(
      {"Frozen",
       with(llama(false, 0),
            [](Config& c) {
              c.model.freeze = {"model.embed_tokens.weight", "model.layers.0.*", "model.layers.1.self_attn.*"};
            }),
       random(3, 3), test::streamed(every({{8}, {4, 4}, {3, 2, 3}, {1, 1, 1, 1, 1, 1, 1, 1}}, {"1f1b"}))});
  const Change no_clip = [](Config& c) { c.train.clip_norm = 0; };
  rows.push_back({"Bert", with(bert(true), no_clip), of_bert(3, 3), in_two});
  rows.push_back({"Mamba", with(mamba(true), no_clip), random(3, 3), test::streamed(every({{10}, {4, 6}}, {"1f1b"}))});
  rows.push_back({"Resnet", with(test::tiny_resnet("bottleneck"), no_clip), random(3, 3),
                  test::streamed(every({{6}, {2, 1, 3}}, {"1f1b"}))});
  rows.push_back({"Slices", with(llama(false, 0), slices({5, 11})), random(3, 3),
                  test::streamed(every({{8}, {3, 5}}, {"gpipe", "1f1b"}, {P2Policy::kFill}))});
  rows.push_back({"Searched", llama(true, 0), random(3, 4),
                  test::streamed({{"auto", P2Policy::kFill, 0, {}, 1},
                                  {"auto", P2Policy::kFill, 0, {}, 2},
                                  {"auto", P2Policy::kFill, 3, {3, 2, 3}},
                                  {"auto", P2Policy::kFill, 4, {2, 2, 1, 3}, 2}})});
  for (const std::string mode : {"activations", "derivatives", "both"}) {
    std::vector<Way> recomputing = in_two;
    for (Way& way : recomputing) way.recompute = {mode};
    rows.push_back({mode, llama(false, 0), random(3, 3), recomputing});
  }
  for (const std::string& name : schedule_names()) {
    std::vector<Way> all;
    for (const auto& [ranks, m] : kSizes) {
      if (m != 4) continue;
      for (const P2Policy policy : policies_of(name)) {
        if (!make_schedule(name, stages_of(name, ranks), m, policy, ranks).has(Op::kBackward))
          all.push_back({name, policy, stages_of(name, ranks), {}, ranks});
      }
    }
    std::string letters = name;
    std::replace_if(
        letters.begin(), letters.end(), [](char c) { return std::isalnum(c) == 0; }, '_');
    rows.push_back({letters, llama(true, 0), random(2, 4), test::streamed(all)});
  }
  for (Row& row : rows) row.name += "Streamed";
  return rows;
}

std::string name_of(const ::testing::TestParamInfo<Row>& info) {
  return info.param.name;
}

INSTANTIATE_TEST_SUITE_P(Llama, SameBits, ::testing::ValuesIn(llamas()), name_of);
INSTANTIATE_TEST_SUITE_P(Sliced, SameBits, ::testing::ValuesIn(sliced()), name_of);
INSTANTIATE_TEST_SUITE_P(Others, SameBits, ::testing::ValuesIn(others()), name_of);
INSTANTIATE_TEST_SUITE_P(Schedules, SameBits, ::testing::ValuesIn(schedules()), name_of);
INSTANTIATE_TEST_SUITE_P(Recomputing, SameBits, ::testing::ValuesIn(recomputing()), name_of);
INSTANTIATE_TEST_SUITE_P(Streaming, SameBits, ::testing::ValuesIn(streaming()), name_of);
INSTANTIATE_TEST_SUITE_P(Families, SameBits, ::testing::ValuesIn(families()), name_of);

TEST(EverySchedule, AdmitsAllSizesAndKeepsTheOrder) {
  for (const std::string& name : schedule_names()) {
    for (const auto& [ranks, m] : kSizes) {
      const int stages = stages_of(name, ranks);
      EXPECT_TRUE(admits(name, stages, ranks, m)) << name << ", M " << m;
      for (const P2Policy policy : policies_of(name))
        EXPECT_FALSE(make_schedule(name, stages, m, policy, ranks).allow_reorder) << name << ", M " << m;
    }
  }
}

TEST(StreamedGradients, AreRefusedForWholeBackwardPasses) {
  Config config = llama(true, 0);
  config.pipeline.micro_batches = 4;
  for (const auto& [schedule, p2] : {std::pair{"1f1b", "off"}, std::pair{"dualpipe-v", "placed"}}) {
    config.pipeline.stages = schedule == std::string("1f1b") ? 2 : 4;
    config.pipeline.ranks = 2;
    config.pipeline.schedule = schedule;
    config.pipeline.p2 = p2;
    config.pipeline.gradients = "streamed";
    test::expect_error([&] { Trainer{config}; }, {"streamed", schedule, "whole backward passes"});
    config.pipeline.gradients = "auto";
    EXPECT_NO_THROW(Trainer{config});
  }
  config.pipeline.gradients = "streamed";
  config.pipeline.p2 = "fill";
  Trainer fills(config);
  test::expect_error(
      [&] {
        fills.step(test::random_batches(1, 4)[0], {"dualpipe-v", P2Policy::kPlaced});
      },
      {"dualpipe-v", "placed", "the order of sums"});
}

// Evaluation uses the schedule's placement, too.
TEST(EverySchedule, EvaluatesOnItsPlacement) {
  Config config = llama(true, 0.5);
  config.data.held_out = 0.5;
  config.train.eval_batches = 2;
  config.pipeline.micro_batches = 4;  // all schedules accept 4 on 2 ranks
  const auto expected = Trainer(config).evaluate();
  ASSERT_TRUE(expected);
  config.pipeline.stages = 0;
  config.pipeline.ranks = 2;
  for (const auto& name : schedule_names()) {
    config.pipeline.schedule = name;
    EXPECT_EQ(Trainer(config).evaluate(), expected) << name;
  }
}

// A run may change these settings from one step to the next.
TEST(SameBitsOfARun, WhenThePlanChangesBetweenSteps) {
  const auto batches = test::random_batches(4, 3);
  Config config = llama(false, 0.5);
  const Outcome expected = test::train(config, batches, Way());
  config.pipeline.stages = 3;
  config.pipeline.split = {3, 2, 3};
  Trainer trainer(config);
  Outcome actual;
  const std::vector<Variant> variants = {{"1f1b", P2Policy::kFill},
                                         {"naive", P2Policy::kOff},
                                         {"gpipe", P2Policy::kEnd, P2Batching::kLoop, 1},
                                         {"1f1b", P2Policy::kCooldown}};
  for (size_t i = 0; i < batches.size(); ++i) {
    const StepResult result = trainer.step(batches[i], variants[i]);
    actual.losses.push_back(result.loss);
    actual.norms.push_back(result.grad_norm);
  }
  actual.weights = test::copies_of(trainer.weights());
  test::expect_same_bits(expected, actual, "changing plans");
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
