// Everything a run is told: one JSON file, sections as below, every key with a default, a type and a unit.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "twobp/pipeline/memory_cap.h"

namespace twobp {

struct ModelConfig {
  std::string from;            // Hugging Face directory: architecture and weights; empty: a new model
  std::string type = "llama";  // see architecture.h
  int64_t dim = 256;
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t kv_heads = 0;  // 0: as many as heads
  int64_t head_dim = 0;  // 0: dim / heads
  int64_t hidden = 0;    // width of the MLP; 0: dim * 8 / 3 rounded up to a multiple of 64, bert: 4 * dim
  int64_t vocab = 256;
  double norm_eps = 1e-5;
  double rope_theta = 10000;
  std::string rope_scaling = "none";  // linear, llama3: see nn/layers/rope.h, also for what follows
  double rope_factor = 1;
  double rope_low_freq = 1;                // llama3
  double rope_high_freq = 4;               // llama3
  double rope_original_positions = 8192;   // llama3
  bool tied = false;                       // input and output embeddings share one matrix
  int64_t positions = 512;                 // bert: the longest sequence
  int64_t token_types = 2;                 // bert
  std::string activation = "gelu";         // bert: gelu, gelu_tanh
  double dropout = 0;                      // bert: of the embeddings and of each half of a block
  double attention_dropout = 0;            // bert: of attention's probabilities
  int64_t state = 16;                      // mamba: numbers a channel of the scan
  int64_t conv_kernel = 4;                 // mamba: positions
  int64_t expand = 2;                      // mamba: channels of the scan per feature of dim
  int64_t dt_rank = 0;                     // mamba: width of the steps' projection; 0: dim / 16 rounded up
  int64_t classes = 1000;                  // resnet
  int64_t channels = 3;                    // resnet: of a picture
  int64_t stem = 64;                       // resnet: channels of its first convolution
  bool small_images = false;               // resnet: that is 3 x 3 with stride 1 and without pooling
  std::string block = "bottleneck";        // resnet: bottleneck, basic
  std::vector<int> depths = {3, 4, 6, 3};  // resnet: blocks of each stage
  std::vector<int> widths;                 // resnet: channels of each stage; empty: the paper's
  double init_std = 0.02;
  std::vector<std::string> freeze;  // patterns (* and ?) of parameter names that are not trained
  int64_t lora = 0;                 // rank of the LoRA adapters, which alone are trained; 0: none
  std::string adapter;              // folder of a saved adapter to start from (PEFT); empty: a new one
  double lora_alpha = 16;           // adapters are scaled by alpha / rank
  std::vector<std::string> lora_targets = {"q_proj", "v_proj"};
};

struct DataConfig {
  std::string text;       // glob of plain text files
  std::string tokenizer;  // tokenizer.json, or a folder with one, for data.text;
                          // empty: that of model.from if it has one, else tokens are bytes
  std::string cache;      // folder for tokenized text; empty: .twobp-cache beside the first text file
  std::string tokens;     // glob of token files: numbers of token_type one after the other, little-endian
  std::string token_type = "uint16";
  std::string arrays;      // folder with input_ids.npy or pixel_values.npy, and labels.npy
  std::string images;      // folder with a sub-folder of JPEG and PNG files for each class
  std::string idx;         // folder with MNIST's files: train-images-idx3-ubyte[.gz] and so on
  std::string cifar;       // folder with CIFAR-10's binary files: data_batch_1.bin and so on
  std::string synthetic;   // "tokens", "images" or "vectors": seeded random input, for benchmarks
  int64_t sequence = 256;  // tokens
  bool shuffle = true;
  double held_out = 0.05;  // fraction of the samples kept for evaluation: of text from the end, of pictures
                           // from each class; data.idx and data.cifar have files of their own for it
  int workers = 1;         // threads that read batches ahead
  double mask_probability = 0.15;  // masked language models: part of the tokens that are hidden
  int64_t image_size = 0;          // pixels, height and width; 0: those of the files, 224 for data.images
  std::string crop;     // none, shift, resized: see images/transform.h; empty: resized for data.images
  int64_t padding = 4;  // pixels, of crop shift
  bool flip = false;    // left to right, every second time
  // Subtracted from a pixel (0 to 1), and then divides it: a value, or one per channel. Empty: ImageNet's for
  // data.images, measured for other bytes, none for float arrays.
  std::vector<double> mean;
  std::vector<double> std;
};

struct PipelineConfig {
  int ranks = 0;                   // devices; 0: as the stages ask, 2 if those are 0 too
  int stages = 0;                  // parts of the model; 0: the schedule's usual number on each rank
  int data_parallel = 1;           // copies of the pipeline, each with its share of every batch
  std::string device = "cpu";      // cpu, cuda
  bool graphs = false;             // on GPUs: steps as CUDA graphs
  bool gpu_parts = false;          // ranks that share a GPU have multiprocessors of their own
  std::string transport = "auto";  // auto, threads, mpi, nccl: see run_world.h
  std::string schedule = "1f1b";   // a name, or a file that ends in .csv: see schedule/text/csv.h
  int micro_batches = 0;           // 0: the schedule's default
  int64_t micro_batch_size = 4;    // sequences
  std::string p2 = "fill";
  std::string p2_batching = "loop";  // loop, concat (slabs), concat_copy
  std::string p2_order = "auto";  // of the W left at the end: oldest, bucket; auto: bucket with data_parallel
  std::string run_ahead = "auto";   // on: a rank begins the next step when it has ended its part of this one
  bool p2_stealing = false;         // at a step's end ranks run weight gradients of others
  std::string bucket = "25MiB";     // gradients that data parallelism sums at once
  std::string memory_cap = "auto";  // "auto", "1.05x", "0" (none), or bytes: "512MiB"
  std::vector<std::string> recompute;  // what layers compute again instead of keeping: see recompute.h
  int threads = 1;                     // per rank
  bool pin = true;                     // pin each rank's threads to cores of its own
  std::vector<int> split;              // layers of each stage, by hand; empty: by measured cost
  double replan = 0;                   // drift of a stage's seconds that calls for a new plan; 0: never
  double timeout = 300;                // seconds a rank waits for a message before it gives up
};

struct OptimizerConfig {
  std::string type = "adamw";  // adamw, adam, sgd
  double lr = 3e-4;
  double weight_decay = 0.01;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double momentum = 0.0;            // sgd
  bool shard = false;               // data parallel: each replica keeps and updates its share (ZeRO stage 1)
  std::string schedule = "cosine";  // constant, linear, cosine
  int64_t warmup = 0;               // steps
  double min_lr = 0.0;              // where linear and cosine end
};

struct TrainConfig {
  int64_t steps = 100;
  uint64_t seed = 1;
  double clip_norm = 0.0;          // 0: no clipping
  int64_t eval_every = 0;          // steps; 0: only at the end, if there is held-out data
  int64_t eval_batches = 16;       // most held-out batches an evaluation reads; 0: all
  int64_t log_every = 1;           // steps between progress lines when the output is no terminal
  std::string precision = "fp32";  // of the compute: fp32, bf16, fp16; the rest stays fp32
  double loss_scale = 65536;       // fp16: the first one
};

struct SaveConfig {
  std::string model;  // folder for config.json and model.safetensors after the last step; empty: none
  std::string dtype = "float32";  // of the saved weights
  std::string lora = "merged";    // merged into the weights, or adapter: PEFT's files alone
  std::string checkpoints;        // folder; empty: none
  int64_t every = 100;            // steps between checkpoints
  int64_t keep = 3;               // the last so many are kept
};

struct Config {
  ModelConfig model;
  DataConfig data;
  PipelineConfig pipeline;
  OptimizerConfig optimizer;
  TrainConfig train;
  SaveConfig save;
};

// The defaults, then the file (unless empty), then each "section.key=value" in turn, then the architecture of
// model.from if it is set; checked by check_config. Throws Error: unreadable file, JSON syntax (line and
// column), unknown key (naming the nearest), wrong type, a key that contradicts model.from.
Config load_config(const std::string& path, const std::vector<std::string>& overrides);
// The same from JSON text; `origin` names it in messages.
Config parse_config(const std::string& json, const std::string& origin,
                    const std::vector<std::string>& overrides);

// Contradictions and values out of range: dim not divisible by heads, both data.text and data.arrays, and so
// on.
void check_config(const Config& config);

// "auto", "1.05x" -> MemoryCap::automatic(); "0" -> no cap; "512MiB", "2GiB", "1000000" -> bytes. Throws
// Error otherwise.
MemoryCap parse_memory_cap(const std::string& text);
// "25MiB", "1000000" -> bytes, at least 1. Throws Error otherwise.
int64_t parse_bucket(const std::string& text);

// The whole configuration as JSON, every key there: what --print-config prints.
std::string config_to_json(const Config& config);
// A line per key: name, type, default, unit and what it means: what --help shows.
std::string config_reference();

}  // namespace twobp
