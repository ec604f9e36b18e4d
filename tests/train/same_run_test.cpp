// Tests which settings a resumed run must share with the stopped run, which changes are noted, and which are free.
#include <functional>

#include <gtest/gtest.h>

#include "tests/model_options.h"
#include "tests/train/helpers.h"
#include "twobp/data/synthetic_dataset.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/schedule/csv.h"
#include "twobp/train/checkpoint/checkpoint_format.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;

Config base() {
  Config config;
  config.data.synthetic = "tokens";
  return config;
}

RunFacts facts(const Config& config, uint64_t data_seed = 1) {
  return facts_of_run(config, *synthetic_tokens(40, 8, 16, data_seed));
}

using Change = std::function<void(Config&)>;

TEST(SameRun, RefusesAndNamesDifferences) {
  const std::vector<std::pair<std::string, Change>> changes = {
      {"model.dim is 512 but 256 in the checkpoint", [](Config& c) { test::llama_of(c).dim = 512; }},
      {"model.layers", [](Config& c) { test::llama_of(c).layers = 5; }},
      {"model.kv_heads is 2 but 4", [](Config& c) { test::llama_of(c).kv_heads = 2; }},
      {"model.hidden", [](Config& c) { test::llama_of(c).hidden = 64; }},
      {"model.norm_eps", [](Config& c) { test::llama_of(c).norm_eps = 1e-6; }},
      {"model.rope_theta", [](Config& c) { test::llama_of(c).rope_theta = 5e5; }},
      {"model.tied is true but false", [](Config& c) { test::llama_of(c).tied = true; }},
      {"model.freeze", [](Config& c) { c.model.freeze = {"*.weight"}; }},
      {"model.lora is 8 but 0", [](Config& c) { c.model.lora = 8; }},
      {"model.lora_targets", [](Config& c) { c.model.lora_targets = {"q_proj"}; }},
      {"data.sequence", [](Config& c) { c.data.sequence = 8; }},
      {"data.shuffle", [](Config& c) { c.data.shuffle = false; }},
      {"data.held_out", [](Config& c) { c.data.held_out = 0.5; }},
      {"pipeline.micro_batches is 5 but 2", [](Config& c) { c.pipeline.micro_batches = 5; }},
      {"pipeline.micro_batch_size", [](Config& c) { c.pipeline.micro_batch_size = 3; }},
      {"optimizer.type is \"sgd\" but \"adamw\"", [](Config& c) { c.optimizer.type = "sgd"; }},
      {"optimizer.momentum", [](Config& c) { c.optimizer.momentum = 0.5; }},
      {"train.seed is 2 but 1", [](Config& c) { c.train.seed = 2; }},
      {"train.precision is \"bf16\" but \"fp32\"", [](Config& c) { c.train.precision = "bf16"; }}};
  Config before = base();
  before.pipeline.micro_batches = 2;
  for (const auto& [text, change] : changes) {
    Config now = before;
    change(now);
    expect_error([&] { check_same_run(facts(before), facts(now)); }, {"cannot resume: ", text});
  }
}

// Older programs allowed keys that the data does not use.
TEST(SameRun, IgnoresKeysThatTheDataDoesNotUse) {
  Config before = base();
  before.data.crop = "none";
  before.data.mask_probability = 0.5;
  EXPECT_EQ(check_same_run(facts(before), facts(base())), std::vector<std::string>{});
}

// The batch of all replicas counts. Another division of it is noted, and another size is refused.
TEST(SameRun, ComparesTheBatchOfAllReplicas) {
  Config before = base();
  before.pipeline.micro_batches = 4;
  Config now = before;
  now.pipeline.data_parallel = 2;
  expect_error([&] { check_same_run(facts(before), facts(now)); },
               {"pipeline.micro_batches x pipeline.data_parallel is 8 but 4"});
  now.pipeline.micro_batches = 2;
  const std::vector<std::string> notes = check_same_run(facts(before), facts(now));
  ASSERT_EQ(notes.size(), 1U);
  EXPECT_NE(notes[0].find("pipeline.data_parallel is 2 but 1"), std::string::npos) << notes[0];
  before = now;
  now.optimizer.shard = true;
  EXPECT_EQ(check_same_run(facts(before), facts(now)), std::vector<std::string>{});
}

TEST(SameRun, ListsAllDifferencesInOneMessage) {
  Config now = base();
  now.train.seed = 9;
  test::llama_of(now).dim = 64;
  expect_error([&] { check_same_run(facts(base()), facts(now)); }, {"model.dim is 64", "; train.seed is 9"});
}

TEST(SameRun, NotesChangesThatAffectTraining) {
  const std::vector<std::pair<std::string, Change>> changes = {
      {"optimizer.lr is 0.1 but", [](Config& c) { c.optimizer.lr = 0.1; }},
      {"optimizer.weight_decay", [](Config& c) { c.optimizer.weight_decay = 0.5; }},
      {"optimizer.beta2", [](Config& c) { c.optimizer.beta2 = 0.9; }},
      {"optimizer.schedule", [](Config& c) { c.optimizer.schedule = "linear"; }},
      {"optimizer.warmup", [](Config& c) { c.optimizer.warmup = 5; }},
      {"train.steps is 500 but 100", [](Config& c) { c.train.steps = 500; }},
      {"train.clip_norm", [](Config& c) { c.train.clip_norm = 1; }},
      {"pipeline.threads is 4 but 1", [](Config& c) { c.pipeline.threads = 4; }},
      {"pipeline.stash", [](Config& c) { c.pipeline.stash = "bf16"; }},
      {"pipeline.p2_batching", [](Config& c) { c.pipeline.p2_batching = "concat"; }}};
  for (const auto& [text, change] : changes) {
    Config now = base();
    change(now);
    const std::vector<std::string> notes = check_same_run(facts(base()), facts(now));
    ASSERT_EQ(notes.size(), 1U) << text;
    EXPECT_EQ(notes[0].rfind(text, 0), 0U) << notes[0];
  }
  RunFacts elsewhere = facts(base());
  elsewhere.kernels = "another CPU";
  EXPECT_EQ(check_same_run(elsewhere, facts(base())).size(), 1U);
}

// If a schedule in a file gives up the order of micro-batches, the bits depend on it.
TEST(SameRun, NotesAnotherOrderOfSums) {
  const auto of = [](const std::string& csv, P2Policy policy) {
    RunFacts facts = facts_of_run(base(), *synthetic_tokens(40, 8, 16, 1),
                                  Variant{ScheduleSource(from_csv(csv, "mine.csv")), policy});
    return facts;
  };
  const std::string turned = "0F1,0F0,0I1,0I0,0W1,0W0\n";
  const std::string other = "0F1,0F0,0I1,0I0,0W0,0W1\n";
  const RunFacts saved = of(turned, P2Policy::kPlaced);
  const auto quiet = std::vector<std::string>{};
  EXPECT_EQ(check_same_run(saved, of(turned, P2Policy::kPlaced)), quiet);
  EXPECT_EQ(check_same_run(of("0F0,0F1,0I0,0I1,0W0,0W1\n", P2Policy::kPlaced), facts(base())), quiet) << "in order";
  for (const RunFacts& now : {of(turned, P2Policy::kEnd), of(other, P2Policy::kPlaced), facts(base())}) {
    for (const auto& notes : {check_same_run(saved, now), check_same_run(now, saved)}) {
      ASSERT_EQ(notes.size(), 1U);
      EXPECT_NE(notes[0].find("not to the bit"), std::string::npos) << notes[0];
    }
  }
}

TEST(SameRun, AllowsAllOtherChanges) {
  const std::vector<Change> changes = {
      [](Config&) {},
      [](Config& c) { c.pipeline.stages = 4; },
      [](Config& c) {
        c.pipeline.split = {1, 2};
      },
      [](Config& c) { c.pipeline.p2 = "off"; },
      [](Config& c) { c.pipeline.recompute = {"both"}; },
      [](Config& c) { c.pipeline.memory_cap = "1GiB"; },
      [](Config& c) { c.pipeline.pin = false; },
      [](Config& c) { c.pipeline.timeout = 5; },
      [](Config& c) { c.train.eval_every = 3; },
      [](Config& c) { c.train.eval_batches = 3; },
      [](Config& c) { c.train.log_every = 3; },
      [](Config& c) { c.save.model = "out"; },
      [](Config& c) { c.save.every = 3; },
      [](Config& c) { c.save.keep = 30; },
      [](Config& c) { c.data.cache = "elsewhere"; },
      [](Config& c) { c.model.from = "there"; },
      [](Config& c) { test::llama_of(c).kv_heads = test::llama_of(c).heads; },
      [](Config& c) { test::llama_of(c).head_dim = test::llama_of(c).dim / test::llama_of(c).heads; }};
  Config before = base();
  before.pipeline.micro_batches = 4;
  for (size_t i = 0; i < changes.size(); ++i) {
    Config now = before;
    changes[i](now);
    EXPECT_EQ(check_same_run(facts(before), facts(now)), std::vector<std::string>{}) << "change " << i;
  }
  // The learning rate of a constant schedule does not depend on the number of steps.
  Config constant = base();
  constant.optimizer.schedule = "constant";
  Config longer = constant;
  longer.train.steps = 1000;
  EXPECT_EQ(check_same_run(facts(constant), facts(longer)), std::vector<std::string>{});
}

// The default number of micro-batches follows the stages. Only the number counts.
TEST(SameRun, ComparesTheResolvedNumberOfMicroBatches) {
  Config now = base();
  now.pipeline.stages = 4;
  expect_error([&] { check_same_run(facts(base()), facts(now)); }, {"pipeline.micro_batches is 4 but 2"});
  now.pipeline.micro_batches = 2;
  EXPECT_EQ(check_same_run(facts(base()), facts(now)), std::vector<std::string>{});
}

TEST(SameRun, ComparesDataByContent) {
  expect_error([&] { check_same_run(facts(base(), 1), facts(base(), 2)); },
               {"cannot resume", "the training data is 40 samples, checksum "});
  Config moved = base();
  moved.data.tokens = "elsewhere/*.bin";
  EXPECT_EQ(check_same_run(facts(base()), facts(moved)), std::vector<std::string>{});
  expect_error([&] { check_same_run(facts(base(), 1), facts(moved, 2)); }, {"data.tokens is \"elsewhere/*.bin\""});
}

// The checkpoint comes from a program without the key. That program behaved as the current default does.
TEST(SameRun, GivesLaterKeysTheirDefaults) {
  RunFacts old = facts(base());
  old.config = R"({"train": {"seed": 1}})";
  RunFacts now = facts(Config{});
  now.data = old.data;
  const auto without = [&](const Change& change) {
    Config config;  // all values are defaults, except those filled in below
    change(config);
    RunFacts changed = facts(config);
    return check_same_run(old, changed);
  };
  expect_error([&] { without([](Config& c) { c.train.precision = "bf16"; }); }, {"train.precision"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
