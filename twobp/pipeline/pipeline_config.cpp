#include "twobp/pipeline/pipeline_config.h"

#include <charconv>
#include <string_view>
#include <system_error>
#include <utility>

#include "twobp/config/settings.h"
#include "twobp/core/check.h"
#include "twobp/models/recompute/recompute_rules.h"
#include "twobp/nn/device/gpu.h"
#include "twobp/pipeline/pipeline_shape.h"
#include "twobp/pipeline/step_plan.h"
#include "twobp/plan/auto_schedule/auto_schedule.h"
#include "twobp/schedule/named_schedules.h"

namespace twobp {
namespace {

std::vector<std::string> names_and_auto() {
  std::vector<std::string> names = schedule_names();
  names.emplace_back(kAutoSchedule);
  return names;
}

std::vector<std::string> policies_and_auto() {
  std::vector<std::string> names = policy_names();
  names.insert(names.begin(), "auto");
  return names;
}

// "1.05x" -> 1.05; 0 if the text has another form.
double parse_times(const std::string& text) {
  double times = 0;
  const char* end = text.data() + text.size();
  const auto [rest, status] = std::from_chars(text.data(), end, times, std::chars_format::fixed);
  const bool parsed = status == std::errc() && std::string_view(rest, end) == "x" && times >= 1 && times <= 1000;
  return parsed ? times : 0;
}

// Layer names are checked later, when the model is built.
void check_recompute(const PipelineConfig& pipeline) {
  try {
    for (const std::string& text : pipeline.recompute) {
      const RecomputeRule rule = parse_recompute_rule(text);
      TWOBP_CHECK(rule.stage < 0 || !pipeline.split.empty(), "\"", text,
                  "\" needs pipeline.split: without it, stages are cut by measured cost, which depends on "
                  "recomputation. Set pipeline.split, or name layers by a pattern");
    }
  } catch (const Error& error) {
    fail("pipeline.recompute: ", error.what(), ".");
  }
}

void check_slices(const PipelineConfig& pipeline) {
  const auto& lengths = pipeline.slice_lengths;
  if (!lengths.empty()) {
    TWOBP_CHECK(std::cmp_equal(lengths.size(), pipeline.slices), "pipeline.slice_lengths lists ", lengths.size(),
                " slices, but pipeline.slices is ", pipeline.slices,
                ": give one length per slice, or [] to cut by cost.");
    for (size_t slice = 0; slice < lengths.size(); ++slice) {
      TWOBP_CHECK(lengths[slice] >= 1 && lengths[slice] <= kMaxWidth, "pipeline.slice_lengths gives slice ", slice, " ",
                  lengths[slice], " positions, but every slice has at least 1.");
    }
  }
  if (pipeline.slices == 1) return;
  TWOBP_CHECK(!pipeline.graphs, "pipeline.slices is ", pipeline.slices,
              ", but pipeline.graphs is set: a step with slices cannot be a graph. Set pipeline.graphs to "
              "false, or slices to 1.");
  TWOBP_CHECK(!ScheduleSource::is_file(pipeline.schedule), "pipeline.slices is ", pipeline.slices,
              ", but pipeline.schedule is \"", pipeline.schedule,
              "\": a schedule file has no slices. Name a schedule, or set slices to 1.");
  TWOBP_CHECK(pipeline.schedule == kAutoSchedule || named_schedule(pipeline.schedule).takes_slices,
              "pipeline.slices is ", pipeline.slices, ", but schedule '", pipeline.schedule,
              "' has no form with slices: use another one, or set slices to 1.");
}

}  // namespace

const Section& pipeline_section() {
  static const Section section = make_section<PipelineConfig>(
      "pipeline",
      {TWOBP_KEY(PipelineConfig, ranks,
                 "devices, each with one or more stages; 0: derived from pipeline.stages, or 2 if that is 0")
           .in("ranks")
           .from(0, kMaxCount)
           .free_on_resume(),
       TWOBP_KEY(PipelineConfig, stages,
                 "parts that the model is cut into; 0: ranks times the schedule's stages per rank (1f1b 1, zb-v 2)")
           .in("stages")
           .from(0, kMaxCount)
           .free_on_resume(),
       TWOBP_KEY(PipelineConfig, data_parallel,
                 "copies of the pipeline, each with micro_batches of every batch; gradients are summed over them")
           .in("replicas")
           .from(1, kMaxCount)
           .noted_on_resume(),
       TWOBP_KEY(PipelineConfig, experts,
                 "replicas that share the experts of each layer, whose tokens travel while W runs; 1: each has all")
           .in("replicas")
           .from(1, kMaxCount)
           .free_on_resume(),
       TWOBP_KEY(PipelineConfig, device,
                 "device of the ranks; cuda: the ranks take this machine's GPUs in turn; with p2 fill, W "
                 "then runs where the simulated step waits (not yet run so on a GPU)")
           .one_of(device_names())
           .free_on_resume(),
       TWOBP_KEY(PipelineConfig, gpu_parts,
                 "with cuda: each rank that shares a GPU gets an equal part of its multiprocessors (green "
                 "contexts, CUDA 12.4), as if the GPU were several smaller ones")
           .free_on_resume(),
       TWOBP_KEY(PipelineConfig, graphs,
                 "with cuda: F, I, W and messages of a step of all ranks are recorded once, as a CUDA graph, "
                 "and launched by one call; not with pipeline.run_ahead on (has run on a GPU with one rank, "
                 "not yet with several)")
           .free_on_resume(),
       TWOBP_KEY(PipelineConfig, transport,
                 "how messages travel between ranks; auto: threads in one process; if a launcher started "
                 "several, nccl on GPUs, and on CPUs torchrun's store under torchrun, else mpi")
           .one_of({"auto", "threads", "mpi", "nccl"})
           .free_on_resume(),
       TWOBP_KEY(PipelineConfig, schedule,
                 "order of F, I and W; \"auto\": a search finds it for the measured times and the cap, with its p2")
           .one_of(names_and_auto())
           .or_file(".csv")
           .free_on_resume(),
       TWOBP_KEY(PipelineConfig, micro_batches,
                 "micro-batches of a replica in an optimizer step; 0: the schedule's default")
           .in("micro-batches")
           .from(0, kMaxCount),
       TWOBP_KEY(PipelineConfig, micro_batch_size, "samples in a micro-batch").in("samples").from(1, kMaxCount),
       TWOBP_KEY(PipelineConfig, slices,
                 "parts that each micro-batch's sequences are cut into; they follow each other through the "
                 "pipeline like micro-batches, for a smaller bubble and less memory with few micro-batches")
           .in("slices")
           .from(1, kMaxCount)
           .noted_on_resume(),
       TWOBP_KEY(PipelineConfig, slice_lengths, "positions of each slice, by hand; []: by cost in operations")
           .in("positions")
           .noted_on_resume(),
       TWOBP_KEY(PipelineConfig, p2,
                 "when weight gradients are computed; off: standard backpropagation; auto: as a schedule "
                 "file has them (placed, or off if it has no W), else fill")
           .one_of(policies_and_auto())
           .free_on_resume(),
       TWOBP_KEY(PipelineConfig, p2_batching,
                 "how W runs for several micro-batches at once: loop (one product for each) or concat (one product "
                 "of all, whose rows are copied together)")
           .one_of({"loop", "concat"})
           .noted_on_resume(),
       TWOBP_KEY(PipelineConfig, p2_order,
                 "order of the weight gradients left at a step's end: bucket (layer by layer, as data parallelism "
                 "sums them), oldest; auto: bucket with data_parallel")
           .one_of({"auto", "bucket", "oldest"})
           .free_on_resume(),
       TWOBP_KEY(PipelineConfig, gradients,
                 "streamed: W waits for the end of the backward pass, runs layer by layer, and each gradient is "
                 "applied and freed when it is complete; auto: where this lowers the fullest rank's peak and takes "
                 "hardly longer; kept: until the end of the step")
           .one_of({"auto", "kept", "streamed"})
           .free_on_resume(),
       TWOBP_KEY(
           PipelineConfig, stash,
           "how tensors that only W reads are kept: as computed (full), or rounded to bfloat16 (bf16); that takes half "
           "the bytes of float32, and changes weight gradients but neither F nor I")
           .one_of({"full", "bf16"})
           .noted_on_resume(),
       TWOBP_KEY(PipelineConfig, run_ahead,
                 "on: a rank begins the next step as soon as it has ended its part of this one, unless an "
                 "evaluation, a checkpoint or a trace comes in between; auto: on if the simulated gain is more "
                 "than 2 %; with train.clip_norm or fp16 it needs a copy of weights and optimizer state")
           .one_of({"auto", "on", "off"})
           .free_on_resume(),
       TWOBP_KEY(PipelineConfig, bucket,
                 "size of the gradients that data parallelism sums at once, when all of them are complete")
           .in("bytes")
           .free_on_resume(),
       TWOBP_KEY(PipelineConfig, sums,
                 "how replicas sum gradients; ordered: in the order of the replicas, with the same bits on every "
                 "transport, over NCCL up to 8 replicas; nccl: by NCCL's own sums, in its order, with processes on "
                 "GPUs (not yet run on GPUs); auto: nccl where it can be and there are more than two replicas")
           .one_of({"auto", "ordered", "nccl"})
           .noted_on_resume(),
       TWOBP_KEY(PipelineConfig, memory_cap,
                 "most bytes of activations and stash that a rank holds: \"auto\" (what the fullest rank needs in "
                 "all with p2 off, less the rank's weights and optimizer), a multiple of that need such as "
                 "\"1.05x\", \"0\" (no cap), or a size such as \"512MiB\"")
           .in("bytes")
           .free_on_resume(),
       TWOBP_KEY(PipelineConfig, recompute,
                 "what layers recompute instead of keeping: none, activations (F again before I), derivatives "
                 "(F and I again before W), both; for all but the first and the last layer, or PATTERN=MODE "
                 "for some layers, or stage:N=MODE for a stage; later entries override earlier ones")
           .free_on_resume(),
       TWOBP_KEY(PipelineConfig, threads, "threads of each rank").in("threads").from(1, 1024).noted_on_resume(),
       TWOBP_KEY(PipelineConfig, pin, "pin each rank's threads to its own cores").free_on_resume().differs_by_process(),
       TWOBP_KEY(PipelineConfig, split, "layers of each stage, by hand; []: by measured cost")
           .in("layers")
           .free_on_resume(),
       TWOBP_KEY(PipelineConfig, timeout, "how long a rank waits for a message before it gives up")
           .in("seconds")
           .above(0)
           .free_on_resume()});
  return section;
}

void check_pipeline(const PipelineConfig& pipeline) {
  parse_memory_cap(pipeline.memory_cap);
  parse_bucket(pipeline.bucket);
  check_recompute(pipeline);
  // A schedule file is checked when it is read for a run.
  const bool file = ScheduleSource::is_file(pipeline.schedule);
  const int stages = file ? pipeline.stages : pipeline_shape(pipeline).stages;
  check_slices(pipeline);
  if (pipeline.split.empty()) return;
  TWOBP_CHECK(stages == 0 || std::cmp_equal(pipeline.split.size(), stages), "pipeline.split lists ",
              pipeline.split.size(), " stages, but pipeline.stages is ", stages,
              ": give one number of layers per stage, or [] to split by measured cost.");
  for (size_t stage = 0; stage < pipeline.split.size(); ++stage) {
    TWOBP_CHECK(pipeline.split[stage] >= 1 && pipeline.split[stage] <= kMaxWidth, "pipeline.split gives stage ", stage,
                " ", pipeline.split[stage], " layers, but every stage has from 1 to ", static_cast<int>(kMaxWidth),
                ".");
  }
}

MemoryCap parse_memory_cap(const std::string& text) {
  if (text == "auto") return MemoryCap::automatic();
  if (const double times = parse_times(text); times > 0) return MemoryCap::automatic(times);
  const int64_t bytes = parse_bytes(text);
  TWOBP_CHECK(bytes >= 0, "pipeline.memory_cap is \"", text,
              "\": write \"auto\", a multiple of it from 1 to 1000 such as \"1.05x\", \"0\" for no cap, or a "
              "size such as \"512MiB\", \"2GiB\" or \"1000000\" (bytes).");
  return bytes;
}

int64_t parse_bucket(const std::string& text) {
  const int64_t bytes = parse_bytes(text);
  TWOBP_CHECK(bytes >= 1, "pipeline.bucket is \"", text, "\": write a size such as \"25MiB\" or \"1000000\" (bytes).");
  return bytes;
}

}  // namespace twobp
