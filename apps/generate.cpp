// `twobp generate`: continues a text with a trained model.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <thread>
#include <unistd.h>
#include <vector>

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>

#include "apps/commands.h"
#include "apps/log.h"
#include "apps/print.h"
#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/core/text.h"
#include "twobp/data/text/tokenizer.h"
#include "twobp/models/hf_config.h"
#include "twobp/models/model_type.h"
#include "twobp/pipeline/pipeline_shape.h"
#include "twobp/train/build_model.h"
#include "twobp/train/generator.h"
#include "twobp/train/trainer.h"
#include "twobp/train/weights/weight_files.h"
#include "twobp/transport/start.h"

namespace twobp {
namespace {

struct GenerateOptions {
  std::string model;
  std::string prompt;
  std::string tokenizer;
  std::string precision = "fp32";
  std::string device = "cpu";
  int64_t tokens = 64;
  int threads = 0;
  bool ignore_end = false;
  SamplingOptions sampling;
};

// Converts between text and tokens with a tokenizer.json. For a model whose vocabulary is the bytes, converts
// bytes.
class Text {
 public:
  Text(const GenerateOptions& options, int64_t vocab) : ends_(read_end_of_text(options.model)) {
    const std::filesystem::path beside = std::filesystem::path(options.model) / "tokenizer.json";
    const bool is_there = std::filesystem::exists(beside);
    if (options.tokenizer.empty() && !is_there) {
      TWOBP_CHECK(vocab == 256, options.model, ": there is no tokenizer.json, and the vocabulary is ", vocab,
                  ", not that of bytes (256): give --tokenizer");
      return;
    }
    tokenizer_ = std::make_unique<Tokenizer>(options.tokenizer.empty() ? beside.string() : options.tokenizer);
    TWOBP_CHECK(tokenizer_->vocab() <= vocab, tokenizer_->path(), ": has ", tokenizer_->vocab(),
                " tokens, but the model's vocabulary is ", vocab, ": it is the tokenizer of another model");
    const std::optional<int64_t> end = tokenizer_->end_of_text();
    if (ends_.empty() && end) ends_ = {*end};
  }

  // Encodes the prompt. It is called once, before anything is printed.
  std::vector<int64_t> encode(const std::string& text) {
    if (tokenizer_) {
      const std::vector<int64_t> ids = tokenizer_->encode(text, /*special=*/true);
      stream_.emplace(*tokenizer_, ids);
      return ids;
    }
    std::vector<int64_t> bytes;
    for (const char c : text) bytes.push_back(static_cast<unsigned char>(c));
    return bytes;
  }

  bool is_end(int64_t token) const { return std::find(ends_.begin(), ends_.end(), token) != ends_.end(); }

  void print(int64_t token) {
    const std::string text =
        tokenizer_ ? stream_->add(token) : std::string(1, static_cast<char>(static_cast<unsigned char>(token)));
    show(text);
  }
  void finish() { show((tokenizer_ ? stream_->finish() : "") + '\n'); }

  // A terminal obeys control characters, so it gets them as escapes. A file gets the text itself. Without a
  // tokenizer, the text comes in single bytes, which may be parts of characters.
  void show(const std::string& text) const {
    const bool one_byte = !tokenizer_ && text.size() == 1 && static_cast<unsigned char>(text[0]) >= 0x80;
    print_as_is(terminal_ && !one_byte ? printable_lines(text) : text);
  }

 private:
  std::vector<int64_t> ends_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::optional<TokenStream> stream_;
  bool terminal_ = is_terminal(STDOUT_FILENO);
};

void generate(const GenerateOptions& options) {
  check_alone("generate", find_launcher());
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  at::set_num_threads(options.threads > 0 ? options.threads : cores);
  ModelConfig config;
  config.from = options.model;
  config.type = read_hf_config(options.model);
  TWOBP_CHECK(!config.type.type().is_bundle, options.model,
              ": a captured model cannot generate text yet: load the folder with transformers for that");
  const ModelInput input = config.input();
  TWOBP_CHECK(input.kind == InputKind::kTokens, options.model, ": a ", input.type,
              " cannot continue a text: give a model that predicts the next token");
  Text text(options, input.vocab);
  Generator generator(build_model(config, compute_dtype(options.precision)), Device::open(options.device, 0));
  load_weights(generator.parameters(), config.weights());
  const std::vector<int64_t> prompt = text.encode(options.prompt);
  TWOBP_CHECK(!prompt.empty(), "--prompt has no tokens: give at least one character");

  const std::vector<std::string> unused = unused_generation_settings(options.model, options.sampling.temperature == 0);
  if (!unused.empty()) {
    log_warning(concat(options.model, "/generation_config.json has ", join(unused),
                       ", which is not supported: transformers would generate another text"));
  }
  text.show(options.prompt);
  const double begin = now_seconds();
  double first = begin;
  int64_t count = 0;
  generator.generate(prompt, options.tokens, options.sampling, [&](int64_t token) {
    if (count == 0) first = now_seconds();
    ++count;
    if (text.is_end(token) && !options.ignore_end) return false;
    text.print(token);
    return true;
  });
  text.finish();
  const double rest = now_seconds() - first;
  std::fprintf(stderr, "%lld tokens after %zu, first after %.2f s, then %.1f tokens/s\n", static_cast<long long>(count),
               prompt.size(), first - begin, count > 1 ? static_cast<double>(count - 1) / rest : 0.0);
}

}  // namespace

void add_generate_command(CLI::App& app) {
  auto options = std::make_shared<GenerateOptions>();
  CLI::App* command = app.add_subcommand("generate", "Continue a text with a trained model");
  command->add_option("model", options->model, "Hugging Face directory, as save.model writes it")->required();
  command->add_option("--prompt", options->prompt, "The text to continue")->required();
  command->add_option("--tokens", options->tokens, "Largest number of tokens to generate")
      ->check(number_from(1, 1 << 24))
      ->capture_default_str();
  command
      ->add_option("--temperature", options->sampling.temperature,
                   "Temperature of the sampling; 0: always the likeliest token")
      ->check(number_from(0, 100))
      ->capture_default_str();
  command
      ->add_option("--top-p", options->sampling.top_p,
                   "Sample only from the fewest likeliest tokens whose probabilities add up to this")
      ->check(number_from(0, 1))
      ->capture_default_str();
  command->add_option("--seed", options->sampling.seed, "Seed of the sampling")
      ->check(number_from(0, 1e18))  // more than 2^64 would be taken as that
      ->capture_default_str();
  command->add_option("--tokenizer", options->tokenizer, "tokenizer.json, if it is not in the model's directory");
  command->add_option("--precision", options->precision, "Precision of the computation")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->capture_default_str();
  command->add_option("--device", options->device, "cpu, or cuda for the first GPU")->capture_default_str();
  command->add_option("--threads", options->threads, "Number of threads; 0: one for each core")
      ->check(number_from(0, 1 << 16))
      ->capture_default_str();
  command->add_flag("--ignore-end", options->ignore_end, "Continue after a token that ends a text");
  command->callback([options] { generate(*options); });
}

}  // namespace twobp
