// The table itself: to add a key, add a member in config.h and a line here.
#include "twobp/train/config/config_keys.h"

#include <cmath>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/nn/layers/rope.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/schedule.h"
#include "twobp/train/model/architecture.h"

namespace twobp {
namespace {

Allowed one_of(std::vector<std::string> choices) {
  Allowed allowed;
  allowed.choices = std::move(choices);
  return allowed;
}

Allowed one_of_or_file(std::vector<std::string> choices, std::string ending) {
  Allowed allowed = one_of(std::move(choices));
  allowed.file = std::move(ending);
  return allowed;
}

std::vector<std::string> names_and_auto() {
  std::vector<std::string> names = schedule_names();
  names.emplace_back("auto");  // train/auto_variant.h
  return names;
}

Allowed from(double min, double max) {
  Allowed allowed;
  allowed.min = min;
  allowed.max = max;
  return allowed;
}

Allowed from_to_below(double min, double max) {
  Allowed allowed = from(min, max);
  allowed.below_max = true;
  return allowed;
}

Allowed above_to(double min, double max) {
  Allowed allowed = from(min, max);
  allowed.above_min = true;
  return allowed;
}

Allowed at_least(double min) {
  Allowed allowed;
  allowed.min = min;
  return allowed;
}

Allowed above(double min) {
  Allowed allowed = at_least(min);
  allowed.above_min = true;
  return allowed;
}

// Upper bounds are far beyond use: they turn a slip of the keyboard into a message and keep products of sizes
// within 64 bits.
constexpr double kMaxWidth = 1 << 20;
constexpr double kMaxCount = 1 << 16;
constexpr double kMaxLength = 1 << 24;

// Section, name and place of a key: written once, so that they cannot differ.
#define KEY(section, name) \
#section, #name, [](Config & config) -> ConfigField { return &config.section.name; }

std::vector<ConfigKey> make_keys() {
  return {
      {KEY(model, from), "",
       "Hugging Face directory to start from: its config.json sets the architecture; \"\": a new model"},
      {KEY(model, type), "", "architecture; mlp is a stack of identical MLP blocks, for benchmarks",
       one_of(architecture_names())},
      {KEY(model, dim), "features", "width of the model", from(1, kMaxWidth)},
      {KEY(model, layers), "blocks", "depth of the model", from(1, kMaxCount)},
      {KEY(model, heads), "heads", "query heads of attention", from(1, kMaxCount)},
      {KEY(model, kv_heads), "heads", "key and value heads; 0: as many as heads", from(0, kMaxCount)},
      {KEY(model, head_dim), "features", "width of a head, even; 0: dim / heads", from(0, kMaxCount)},
      {KEY(model, hidden), "features",
       "width of the MLP; 0: dim * 8 / 3 rounded up to a multiple of 64, bert: 4 * dim",
       from(0, 4 * kMaxWidth)},
      {KEY(model, vocab), "tokens",
       "size of the vocabulary; 256 for data.text without a tokenizer, whose tokens are bytes",
       from(1, kMaxLength)},
      {KEY(model, norm_eps), "", "added to the mean square in RMSNorm, to the variance in BERT's LayerNorm",
       above(0)},
      {KEY(model, rope_theta), "positions", "base of the rotary embedding's wavelengths", above(0)},
      {KEY(model, rope_scaling), "", "how they are stretched for longer sequences",
       one_of(rope_scaling_names())},
      {KEY(model, rope_factor), "", "linear, llama3: how far", above(0)},
      {KEY(model, rope_low_freq), "", "llama3: wavelengths above original positions / this are stretched",
       above(0)},
      {KEY(model, rope_high_freq), "", "llama3: wavelengths below original positions / this are not",
       above(0)},
      {KEY(model, rope_original_positions), "tokens", "llama3: longest sequence before the stretching",
       above(0)},
      {KEY(model, tied), "", "input and output embeddings share one matrix"},
      {KEY(model, positions), "tokens",
       "bert: the longest sequence, each position with an embedding of its own", from(1, kMaxLength)},
      {KEY(model, activation), "", "bert: of the MLP", one_of({"gelu", "gelu_tanh"})},
      {KEY(model, dropout), "",
       "bert: part of the numbers dropped after the embeddings and after each half of a block",
       from_to_below(0, 1)},
      {KEY(model, attention_dropout), "", "bert: part of attention's probabilities that is dropped",
       from_to_below(0, 1)},
      {KEY(model, token_types), "", "bert: kinds of tokens, such as those of two sentences",
       from(1, kMaxCount)},
      {KEY(model, state), "numbers", "mamba: of a channel of the scan", from(1, kMaxCount)},
      {KEY(model, conv_kernel), "positions", "mamba: width of the convolution, 16 at most",
       from(1, kMaxCount)},
      {KEY(model, expand), "", "mamba: channels of the scan, times dim", from(1, kMaxCount)},
      {KEY(model, dt_rank), "features", "mamba: width of the steps before their projection; 0: dim / 16",
       from(0, kMaxWidth)},
      {KEY(model, classes), "classes", "resnet: what pictures are told apart by", from(2, kMaxWidth)},
      {KEY(model, channels), "channels", "resnet: of a picture", from(1, kMaxCount)},
      {KEY(model, stem), "channels", "resnet: of its first convolution", from(1, kMaxCount)},
      {KEY(model, small_images), "",
       "resnet: that is 3 x 3 with stride 1 and without pooling, for images of 28 or 32 pixels"},
      {KEY(model, block), "", "resnet: three convolutions of which one is 3 x 3, or two of 3 x 3",
       one_of({"bottleneck", "basic"})},
      {KEY(model, depths), "blocks",
       "resnet: of each stage; every stage but the first halves height and width"},
      {KEY(model, widths), "channels",
       "resnet: of each stage; []: 64, 128, 256, 512, times 4 of bottlenecks"},
      {KEY(model, init_std), "",
       "standard deviation of the initial weights; resnet, some of mamba's: by their inputs", at_least(0)},
      {KEY(model, freeze), "", "patterns (* and ?) of the names of parameters that are not trained"},
      {KEY(model, lora), "", "rank of LoRA adapters, which alone are trained; 0: none", from(0, kMaxCount)},
      {KEY(model, adapter), "", "folder of a LoRA adapter to go on from, as PEFT saves it; \"\": a new one"},
      {KEY(model, lora_alpha), "", "LoRA adapters are scaled by this over the rank", above(0)},
      {KEY(model, lora_targets), "", "ends of the names of the projections that get an adapter"},

      {KEY(data, text), "", "glob of plain text files, read as bytes unless there is a tokenizer"},
      {KEY(data, tokenizer), "",
       "tokenizer.json, or a folder with one, for data.text; \"\": that of model.from, else tokens are "
       "bytes"},
      {KEY(data, cache), "", "folder for tokenized text; \"\": .twobp-cache beside the first text file"},
      {KEY(data, tokens), "", "glob of token files: little-endian numbers one after the other"},
      {KEY(data, token_type), "", "of the numbers in data.tokens", one_of({"uint16", "uint32"})},
      {KEY(data, arrays), "", "folder with labels.npy and input_ids.npy, or pixel_values.npy for pictures"},
      {KEY(data, images), "", "folder with a sub-folder of JPEG and PNG files for each class"},
      {KEY(data, idx), "", "folder with MNIST's files, gzipped or not; the t10k ones are held out"},
      {KEY(data, cifar), "", "folder with CIFAR-10's binary files; test_batch.bin is held out"},
      {KEY(data, synthetic), "", "seeded random input, for benchmarks; vectors is for the mlp model",
       one_of({"tokens", "images", "vectors"})},
      {KEY(data, sequence), "tokens", "length of a sample", from(1, kMaxLength)},
      {KEY(data, shuffle), "", "a new order of the samples each epoch, from train.seed"},
      {KEY(data, held_out), "fraction",
       "part of the samples kept for evaluation: of text from the end, of pictures from each class",
       from_to_below(0, 1)},
      {KEY(data, workers), "threads", "read batches ahead, at a low priority", from(1, 1024)},
      {KEY(data, mask_probability), "fraction", "masked language models: part of the tokens that are hidden",
       above_to(0, 1)},
      {KEY(data, image_size), "pixels", "height and width; 0: those of the files, 224 for data.images",
       from(0, kMaxCount)},
      {KEY(data, crop), "",
       "part of a picture in training: the centre, that moved, any part scaled; \"\": resized for "
       "data.images",
       one_of({"none", "shift", "resized"})},
      {KEY(data, padding), "pixels", "how far crop shift moves at most", from(0, kMaxCount)},
      {KEY(data, flip), "", "pictures left to right, every second time in training"},
      {KEY(data, mean), "",
       "subtracted from pixels (0 to 1); []: ImageNet's for data.images, else measured; none for floats"},
      {KEY(data, std), "", "divides them then; [] likewise"},

      {KEY(pipeline, ranks), "ranks", "devices, each with one or more stages; 0: as the stages ask, else 2",
       from(0, kMaxCount)},
      {KEY(pipeline, stages), "stages",
       "parts the model is cut into; 0: ranks times what the schedule places on each (1f1b 1, zb-v 2)",
       from(0, kMaxCount)},
      {KEY(pipeline, data_parallel), "replicas",
       "copies of the pipeline, each with micro_batches of every batch; gradients are summed over them",
       from(1, kMaxCount)},
      {KEY(pipeline, device), "",
       "where ranks compute; cuda: rank by rank on this machine's GPUs, in turn, with W in a stream of low "
       "priority (one process without replicas; never run on a GPU so far)",
       one_of({"cpu", "cuda"})},
      {KEY(pipeline, gpu_parts), "",
       "with cuda: ranks that share a GPU get equal parts of its multiprocessors each (green contexts, CUDA "
       "12.4), as if it were several smaller ones"},
      {KEY(pipeline, graphs), "",
       "with cuda: F, I, W and messages of a step of all ranks are recorded once, as a CUDA graph, and put "
       "in by one call; not with pipeline.run_ahead on (never run on a GPU so far)"},
      {KEY(pipeline, transport), "",
       "what ranks talk through; auto: mpi or nccl where a launcher started several processes, else threads",
       one_of({"auto", "threads", "mpi", "nccl"})},
      {KEY(pipeline, schedule), "",
       "order of the work; \"auto\": what a search finds for the measured times and the cap, p2 included",
       one_of_or_file(names_and_auto(), ".csv")},
      {KEY(pipeline, micro_batches), "micro-batches",
       "of a replica per optimizer step; 0: the schedule's default", from(0, kMaxCount)},
      {KEY(pipeline, micro_batch_size), "samples", "per micro-batch", from(1, kMaxCount)},
      {KEY(pipeline, p2), "", "when weight gradients are computed; off: standard backpropagation",
       one_of(policy_names())},
      {KEY(pipeline, p2_batching), "",
       "micro-batches due together: one call each, or one call on slabs or on a copy",
       one_of({"loop", "concat", "concat_copy"})},
      {KEY(pipeline, p2_order), "",
       "of weight gradients left at a step's end: bucket (layer by layer, as data parallelism sums them), "
       "oldest; auto: bucket with data_parallel",
       one_of({"auto", "bucket", "oldest"})},
      {KEY(pipeline, run_ahead), "",
       "on: a rank begins the next step as soon as it has ended its part of this one, where nothing is to be "
       "done in between (evaluation, checkpoint, trace); auto: where the simulation gains more than 2 % by "
       "it; with train.clip_norm or fp16 it costs a copy of weights and optimizer state",
       one_of({"auto", "on", "off"})},
      {KEY(pipeline, p2_stealing), "",
       "a rank that has ended its part of a step runs weight gradients that others have left, same bits: for "
       "ranks that are threads of one process on a CPU; not in a step that is traced"},
      {KEY(pipeline, bucket), "bytes",
       "gradients that data parallelism sums at once, begun when all of them are there"},
      {KEY(pipeline, memory_cap), "bytes",
       "most bytes of activations and stash a rank holds: \"auto\" (the peak of the fullest stage with p2 "
       "off), so many times what that stage needs in all, as in \"1.05x\", \"0\" (no cap), or as in "
       "\"512MiB\""},
      {KEY(pipeline, recompute), "",
       "what layers compute again instead of keeping: none, activations (F again before I), derivatives (F "
       "and I again before W), both; for all but the first and the last layer, or PATTERN=MODE of layers, or "
       "stage:N=MODE; later ones count"},
      {KEY(pipeline, threads), "threads", "per rank", from(1, 1024)},
      {KEY(pipeline, pin), "", "pin each rank's threads to cores of its own"},
      {KEY(pipeline, split), "layers", "layers of each stage, by hand; []: by measured cost"},
      {KEY(pipeline, replan), "fraction",
       "a stage's time that drifts this far from the plan's calls for another schedule; 0: never",
       at_least(0)},
      {KEY(pipeline, timeout), "seconds", "a rank waits for a message before it gives up", above(0)},

      {KEY(optimizer, type), "", "update rule", one_of({"adamw", "adam", "sgd"})},
      {KEY(optimizer, lr), "", "highest learning rate", above(0)},
      {KEY(optimizer, weight_decay), "", "decoupled for adamw, L2 for adam and sgd", at_least(0)},
      {KEY(optimizer, beta1), "", "adam: decay of the mean gradient", from_to_below(0, 1)},
      {KEY(optimizer, beta2), "", "adam: decay of the mean squared gradient", from_to_below(0, 1)},
      {KEY(optimizer, eps), "", "adam: added to the denominator", above(0)},
      {KEY(optimizer, momentum), "", "sgd: momentum", from_to_below(0, 1)},
      {KEY(optimizer, shard), "",
       "with data_parallel: each replica keeps the optimizer state of its share of the weights (ZeRO stage "
       "1)"},
      {KEY(optimizer, schedule), "", "learning rate after the warm-up",
       one_of({"constant", "linear", "cosine"})},
      {KEY(optimizer, warmup), "steps", "the learning rate rises over these", at_least(0)},
      {KEY(optimizer, min_lr), "", "where linear and cosine end", at_least(0)},

      {KEY(train, steps), "steps", "optimizer steps of the run", at_least(1)},
      {KEY(train, seed), "", "of the initial weights, the order of the samples and synthetic data"},
      {KEY(train, clip_norm), "", "largest global gradient norm; 0: no clipping", at_least(0)},
      {KEY(train, eval_every), "steps", "between evaluations; 0: only at the end, if there is held-out data",
       at_least(0)},
      {KEY(train, eval_batches), "batches", "most held-out batches an evaluation reads; 0: all", at_least(0)},
      {KEY(train, log_every), "steps", "between progress lines when the output is no terminal", at_least(1)},
      {KEY(train, precision), "", "of the compute; gradients, weights and optimizer state stay fp32",
       one_of({"fp32", "bf16", "fp16"})},
      {KEY(train, loss_scale), "", "fp16: the first one; halved when a step overflows", at_least(1)},

      {KEY(save, model), "",
       "folder for the trained model after the last step, also one that Ctrl-C made the last; empty: none"},
      {KEY(save, dtype), "", "of the saved weights", one_of({"float32", "bfloat16", "float16"})},
      {KEY(save, lora), "", "LoRA: merged into the weights, or the adapter alone in PEFT's files",
       one_of({"merged", "adapter"})},
      {KEY(save, checkpoints), "", "folder for checkpoints; empty: none"},
      {KEY(save, every), "steps", "between checkpoints", at_least(1)},
      {KEY(save, keep), "checkpoints", "the last so many are kept", at_least(1)},
  };
}

#undef KEY

struct TypeName {
  std::string_view operator()(const bool*) const { return "boolean"; }
  std::string_view operator()(const int*) const { return "integer"; }
  std::string_view operator()(const int64_t*) const { return "integer"; }
  std::string_view operator()(const uint64_t*) const { return "integer"; }
  std::string_view operator()(const double*) const { return "number"; }
  std::string_view operator()(const std::string*) const { return "text"; }
  std::string_view operator()(const std::vector<int>*) const { return "list of integers"; }
  std::string_view operator()(const std::vector<std::string>*) const { return "list of texts"; }
  std::string_view operator()(const std::vector<double>*) const { return "list of numbers"; }
};

}  // namespace

bool Allowed::contains(double value) const {
  if (!std::isfinite(value)) return false;
  return (above_min ? value > min : value >= min) && (below_max ? value < max : value <= max);
}

std::string Allowed::text() const {
  if (!choices.empty()) {
    return "one of " + join(choices) + (file.empty() ? "" : ", or a file that ends in " + file);
  }
  // 16777216, not 1.67772e+07.
  const auto number = [](double value) {
    return value == std::floor(value) ? std::to_string(static_cast<long long>(value)) : concat(value);
  };
  std::string out;
  if (std::isfinite(min)) {
    out = (above_min ? "above " : std::isfinite(max) ? "from " : "at least ") + number(min);
  }
  if (std::isfinite(max)) out += (below_max ? " to below " : " to ") + number(max);
  return out;
}

std::string ConfigKey::full_name() const {
  return concat(section, ".", name);
}

std::string_view ConfigKey::type() const {
  Config config;
  return std::visit(TypeName{}, field(config));
}

const std::vector<ConfigKey>& config_keys() {
  static const std::vector<ConfigKey> keys = make_keys();
  return keys;
}

}  // namespace twobp
