// The section `pipeline` of the configuration.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "twobp/config/section.h"

namespace twobp {

// pipeline.schedule: search for a schedule (train/variant.h).
inline constexpr std::string_view kAutoSchedule = "auto";

struct PipelineConfig {
  int ranks = 0;                       // devices; 0: as the stages require, or 2 if those are 0 too
  int stages = 0;                      // parts of the model; 0: the schedule's usual number on each rank
  int data_parallel = 1;               // copies of the pipeline, each with its share of every batch
  int experts = 1;                     // replicas that share the experts of each layer
  std::string device = "cpu";          // cpu, cuda
  bool graphs = false;                 // on GPUs: steps as CUDA graphs
  bool gpu_parts = false;              // each rank that shares a GPU gets multiprocessors of its own
  std::string transport = "auto";      // auto, threads, mpi, nccl
  std::string schedule = "1f1b";       // a name, or a file that ends in .csv: see schedule/text/csv.h
  int micro_batches = 0;               // 0: the schedule's default
  int64_t micro_batch_size = 4;        // sequences
  int slices = 1;                      // of each micro-batch's sequences, in training
  std::vector<int> slice_lengths;      // positions, by hand; empty: by their cost
  std::string p2 = "auto";             // auto: the schedule's own (ScheduleSource::default_policy)
  std::string p2_batching = "loop";    // loop, concat
  std::string p2_order = "auto";       // of the W left at the end: oldest, bucket; auto: bucket with data_parallel
  std::string gradients = "kept";      // auto, kept, streamed
  std::string stash = "full";          // of tensors that only W reads: full, bf16
  std::string run_ahead = "auto";      // on: a rank begins the next step when it has ended its part of this one
  std::string bucket = "25MiB";        // size of the gradients that data parallelism sums at once
  std::string sums = "auto";           // of gradients over replicas: auto, ordered, nccl
  std::string memory_cap = "auto";     // "auto", "1.05x", "0" (none), or bytes: "512MiB"
  std::vector<std::string> recompute;  // what layers recompute instead of keeping: see recompute.h
  int threads = 1;                     // per rank
  bool pin = true;                     // pin each rank's threads to cores of its own
  std::vector<int> split;              // layers of each stage, by hand; empty: by measured cost
  double timeout = 300;                // seconds a rank waits for a message before it gives up
};

const Section& pipeline_section();

// Throws Error if keys contradict each other.
void check_pipeline(const PipelineConfig& config);

}  // namespace twobp
