// Tests a user's mistakes. Each gives exit code 1 and one message on stderr that says what is wrong and where. Nothing
// hangs.
#include <filesystem>
#include <tuple>

#include "tests/program/subprocess.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::expect_one_message;
using test::tiny_config;

class BadInput : public test::InAFolder {
 protected:
  // Expects an error for the tiny configuration with one override.
  void expect(const std::string& override, const std::vector<std::string>& parts) const {
    SCOPED_TRACE(override);
    expect_one_message({"train", config(tiny_config()), "--set", override}, parts);
  }
};

// config_test and data_test have all errors of settings and data.
TEST_F(BadInput, UnknownKeyNamesTheNearest) {
  expect("model.dims=3", {"model.dims", "did you mean \"model.dim\""});
  expect("modle.dim=3", {"modle", "model"});
  expect("lr=3", {"lr", "optimizer.lr"});
  json content = tiny_config();
  content["pipeline"]["stagse"] = 2;
  expect_one_message({"train", config(content)},
                     {"config.json", "pipeline.stagse", "did you mean \"pipeline.stages\""});
}

TEST_F(BadInput, UnknownCommandNamesTheNearest) {
  expect_one_message({"trian"}, {"no command \"trian\"", "did you mean \"train\"", "profile"});
  expect_one_message({"checkpoint", "inspct", "x"}, {"no command \"inspct\"", "did you mean \"inspect\""});
  expect_one_message({"plan", "--schedul", "1f1b"}, {"--schedul", "did you mean --schedule?"});
}

// NaN compares false with every limit, and a negative number may wrap around to a large one.
TEST_F(BadInput, RefusesBadNumbersOnTheCommandLine) {
  const std::vector<std::tuple<std::vector<std::string>, const char*, const char*>> wrong = {
      {{"plan"}, "--top", "nan"}, {{"plan"}, "--latency", "-nan"},   {{"plan"}, "--svg-end", "inf"},
      {{"plan"}, "--top", "-3"},  {{"profile"}, "--seconds", "inf"}, {{"bench"}, "--repeat", "-1"}};
  for (const auto& [command, option, value] : wrong) {
    std::vector<std::string> arguments = command;
    arguments.push_back(concat(option, "=", value));
    expect_one_message(arguments, {option, concat("'", value, "' is not a number ")});
  }
  expect("optimizer.lr=nan", {"optimizer.lr"});
  expect("pipeline.timeout=inf", {"pipeline.timeout"});
  expect("pipeline.data_parallel=40000", {"40000", "80000 ranks", "1024 at most"});
}

TEST_F(BadInput, RefusesOneFileForTwoOptions) {
  const std::string file = path("out.json");
  expect_one_message({"train", config(tiny_config()), "--metrics", file, "--trace", file},
                     {"--metrics and --trace", file});
  expect_one_message({"plan", "--json", file, "--svg", path("./out.json")}, {"--json and --svg", file});
  expect_one_message({"plan", "--costs", file, "--ranks", "2", "--json", file}, {"--costs and --json", file});
}

TEST_F(BadInput, SaysHowToDownloadANameOnTheHub) {
  for (const char* key : {"model.from", "data.tokenizer"}) {
    expect_one_message({"train", "--set", "data.text=" + folder_.write("a.txt", "Some text."), "--set",
                        concat(key, "=org/some-model")},
                       {"org/some-model", "Hugging Face Hub", "hf download org/some-model"});
  }
  expect_one_message({"train", "--set", "model.from=gpt2", "data.synthetic=tokens"}, {"hf download gpt2"});
}

// A file may contain any name. Control characters in it are shown, so that the terminal does not obey them.
TEST_F(BadInput, ShowsControlCharacters) {
  const std::string evil = "a\x1b[31m\xc2\x9b\xe2\x80\xae\n";
  const std::string shown = "a\\x1b[31m\\u{9b}\\u{202e}\\n";
  expect_one_message({"train", path(evil + ".json")}, {shown});
  expect("model." + evil + "=3", {shown});
  json content = tiny_config();
  content["model"][evil] = 1;
  expect_one_message({"train", config(content)}, {shown});
  expect_one_message({evil}, {shown});
  const std::string csv = path(evil + ".csv");
  test::expect_success({"plan", "--csv", csv});
  const test::Finished plan = test::expect_success({"plan", "--schedule", csv});
  test::expect_contains(plan.out, {shown});
  EXPECT_EQ(plan.out.find('\x1b'), std::string::npos);
  const std::string saved = path("model" + evil);
  const test::Finished train = test::expect_success({"train", config(tiny_config()), "--set", "train.steps=1", "--set",
                                                     "save.model=" + saved, "--set", "save.checkpoints=" + path(evil)});
  test::expect_contains(train.out, {"saved " + path("model") + "a\\x1b[31m"});
  EXPECT_EQ(train.out.find('\x1b'), std::string::npos);
  // The checkpoint holds the configuration, which contains that path.
  const test::Finished inspect = test::expect_success({"checkpoint", "inspect", path(evil), "--tensors"});
  test::expect_contains(inspect.out, {"save.checkpoints=" + path("") + "a\\x1b[31m"});
  EXPECT_EQ(inspect.out.find('\x1b'), std::string::npos);
}

// The program must not load a library from the current folder, because somebody else may have put it there.
TEST_F(BadInput, DoesNotLoadLibrariesFromTheCurrentFolder) {
  const test::Finished result = test::run_in_shell(
      "cd \"$1\" || exit; for name in $(ldd \"$0\" | sed -n 's/^[[:space:]]*\\(lib[^ ]*\\) .*/\\1/p'); do : "
      "> $name; done; "
      "ls; exec \"$0\" --version",
      {path("")});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("libc10.so"), std::string::npos) << "none was planted: " << result.out;
}

// Standard output is on a full disk.
TEST_F(BadInput, ReportsLostOutput) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "there is no /dev/full";
  const std::string file = config(tiny_config());
  for (const std::vector<std::string>& arguments : {std::vector<std::string>{"--help"},
                                                    {"--version"},
                                                    {"plan"},
                                                    {"train", file},
                                                    {"train", "--print-config"},
                                                    {"eval", file},
                                                    {"bench", file, "--repeat=1", "--steps=1"},
                                                    {"profile", file, "--seconds=0"}}) {
    const test::Finished result = test::run_in_shell("exec \"$0\" \"$@\" > /dev/full", arguments);
    EXPECT_EQ(result.exit_code, 1) << arguments.front();
    EXPECT_EQ(result.err, "twobp: error: cannot write to standard output: No space left on device\n")
        << arguments.front();
  }
}

TEST_F(BadInput, RefusesContradictions) {
  expect("data.text=*.txt", {"data.text", "data.synthetic", "one source"});
  expect("pipeline.split=1,2", {"pipeline.split", "6 layers", "sum to 3"});
}

TEST_F(BadInput, RefusesAScheduleThatCannotRun) {
  expect("pipeline.stages=7", {"6 layers", "7 stages", "pipeline.stages"});
  expect("pipeline.schedule=1f2b", {"pipeline.schedule", "1f2b", "did you mean \"1f1b\""});
  expect("pipeline.p2=later", {"pipeline.p2", "later"});
}

// The weights overflow in the first steps, on every stage. The message names the layer and the step.
TEST_F(BadInput, ReportsALearningRateThatMakesNaN) {
  for (const char* clip : {"train.clip_norm=0", "train.clip_norm=1"}) {
    for (const char* stages : {"pipeline.stages=1", "pipeline.stages=3"}) {
      SCOPED_TRACE(concat(clip, ", ", stages));
      expect_one_message(
          {"train", config(tiny_config()), "--set", "optimizer.lr=1e30", "--set", "optimizer.warmup=0", "--set",
           "train.steps=100", "--set", clip, "--set", stages, "--set", "save.model=" + path("deep/model")},
          {"layer ", "is not finite in step ", "optimizer.lr"});
      EXPECT_FALSE(std::filesystem::exists(path("deep")));
    }
  }
}

TEST_F(BadInput, NamesFilesThatCannotBeWritten) {
  const std::string file = config(tiny_config());
  expect_one_message({"train", file, "--metrics", path("no/such/folder")}, {path("no/such/folder")});
  expect_one_message({"train", file, "--set", "save.model=" + folder_.write("taken", "")}, {path("taken")});
  if (std::filesystem::exists("/dev/full")) {
    expect_one_message({"train", file, "--metrics", "/dev/full"}, {"/dev/full", "No space left on device"});
  }
}

// A weight needs 844 TB, which is beyond the address space of any machine. LibTorch's error is one line, without its
// backtrace.
TEST_F(BadInput, ReportsAModelThatDoesNotFit) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer's allocator adds a line of its own";
#endif
  expect_one_message({"train", config(tiny_config()), "--set", "model.dim=16384", "--set", "model.heads=65536", "--set",
                      "model.head_dim=65536"},
                     {"allocate"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
