// The trainer for Python. A step runs without the GIL.
#include "twobp/train/trainer.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <nlohmann/json.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/utils/pybind.h>

#include "python/native/given.h"
#include "python/native/module.h"
#include "python/native/unlocked.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/graph/read_graph.h"
#include "twobp/models/captured.h"
#include "twobp/models/model_type.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/pipeline_shape.h"
#include "twobp/trace/trace.h"
#include "twobp/train/build_model.h"
#include "twobp/train/checkpoint/checkpointer.h"
#include "twobp/train/update/update.h"
#include "twobp/train/variant.h"
#include "twobp/train/weights/save_model.h"
#include "twobp/train/weights/weight_files.h"
#include "twobp/transport/c10d/c10d_transport.h"
#include "twobp/transport/collectives.h"
#include "twobp/transport/start.h"

namespace twobp::python {
namespace {

// The samples of one micro-batch, again and again: what layers are measured with. Fields without a row for
// each sample are read whole.
class ExampleDataset : public Dataset {
 public:
  // The samples of the fields, over and over.
  ExampleDataset(Fields fields, int64_t samples, int64_t size)
      : fields_(std::move(fields)), samples_(samples), size_(size) {}
  int64_t size() const override { return size_; }
  Fields read(const std::vector<int64_t>& indices, int64_t /*epoch*/) const override {
    const at::Tensor rows = at::tensor(indices, at::kLong).remainder(samples_);
    Fields read;
    for (const auto& [name, tensor] : fields_) {
      const bool by_sample = tensor.dim() > 0 && tensor.size(0) == samples_;
      read[name] = by_sample ? tensor.index_select(0, rows) : tensor;
    }
    return read;
  }

 private:
  Fields fields_;
  int64_t samples_, size_;
};

// Of the trainers over process groups, which all processes make in the same order.
std::atomic<int> next_channel{0};

class PyTrainer {
 public:
  // `graph`: graph.json of a captured module, or empty for a model of the configuration. `group`: the name of
  // the c10d::ProcessGroup whose processes run a rank each, or empty if this process runs all ranks.
  PyTrainer(const std::string& config, const std::string& graph, const Fields& constants, const Fields& example,
            const Fields& weights, const std::string& group)
      : process_(::getpid()) {
    const Launcher launcher = find_launcher();
    TWOBP_CHECK(!group.empty() || !launcher.started_many(), name_of(launcher.kind), " started ", launcher.size,
                " processes: connect them by twobp.init_process_group() before the trainer is made");
    const Unlocked unlocked;
    std::optional<ModelOptions> own;
    if (!graph.empty()) {
      graph_ = graph::parse_graph(graph, "the captured module", constants);
      own.emplace(CapturedOptions::kType);
      own->as<CapturedOptions>().graph = graph_;
    }
    Config made = parse_config_without_data(config, "the settings", own ? &*own : nullptr);
    TWOBP_CHECK(made.pipeline.transport == "auto",
                "a trainer in Python connects its processes itself: leave out transport");
    const int replicas = static_cast<int>(made.pipeline.data_parallel);
    TWOBP_CHECK(replicas == 1 || !group.empty(), "data_parallel is ", replicas,
                ", but this is the only process, and in Python each rank of a replica is a process: start ",
                int64_t{replicas} * pipeline_shape(made.pipeline).ranks,
                " processes by torchrun, or leave out data_parallel");
    const ModelSpec whole = build_model(made);
    input_ = made.model.input();
    check_given(example, input_);
    const int64_t batch = int64_t{replicas} * pipeline_shape(made.pipeline).micro_batches;
    auto data = std::make_shared<ExampleDataset>(as_read(example, input_), made.pipeline.micro_batch_size,
                                                 batch * made.pipeline.micro_batch_size);
    DataSplit split{std::move(data), nullptr};
    const bool shares = made.pipeline.experts > 1;
    if (group.empty()) {
      trainer_ = std::make_unique<Trainer>(made, whole, std::move(split));
    } else {
      World world = world_of(made.pipeline, c10d::resolve_process_group(group), launcher);
      const ExpertShare share{made.pipeline.experts, world.replica % made.pipeline.experts};
      trainer_ = std::make_unique<Trainer>(made, shares ? build_model(made, share) : whole, std::move(split),
                                           std::move(world));
    }
    if (!made.model.from.empty()) {
      load_weights(trainer_->pipeline(), made.model.weights(), shares ? &whole : nullptr);
    }
    if (!weights.empty()) {
      write(trainer_->update().live_weights(), weights, trainer_->update().optimizer_steps());
    }
    trainer_->stop_when([] { return interrupted() || exit_waits(); });
  }
  // A forked process has none of the trainer's threads, so that it cannot end them.
  ~PyTrainer() {
    if (process_ == ::getpid()) {
      const WithoutGil free;
      checkpointer_.reset();
      trainer_.reset();
      return;
    }
    static_cast<void>(trainer_.release());
    static_cast<void>(checkpointer_.release());
  }
  PyTrainer(const PyTrainer&) = delete;
  PyTrainer& operator=(const PyTrainer&) = delete;

  // `next`: the first micro-batches of the next step, as far as they are known.
  py::dict step(const std::vector<Fields>& micro_batches, std::optional<double> lr, const std::vector<Fields>& next) {
    const Use use(*this);
    const Batch batch = checked_batch(micro_batches);
    const std::vector<Fields> own_next = own_batch(next).micro_batches;
    const std::string name = concat("step ", trainer_->steps_done() + 1);
    last_ = to_dict(until_done(name + " was given up: it has changed nothing", [&]() -> std::optional<StepResult> {
      StepResult done = trainer_->step(batch, trainer_->variant(), lr, own_next);
      if (done.given_up || trainer_->stopping()) trainer_->go_on_from(trainer_->position());
      if (done.given_up) return std::nullopt;
      return done;
    }));
    if (drawn_ && drawn_->complete()) draw();
    run_handlers(counted());
    return last_;
  }

  // Runs F as in training, without a step, for what it leaves in buffers. Returns what the last layer gives beside the
  // loss, by micro-batch; empty lists in other processes than the one that runs it.
  std::vector<std::vector<at::Tensor>> forward(const std::vector<Fields>& micro_batches) {
    const Use use(*this);
    BatchEvaluation sums;
    std::vector<Values> predictions;
    evaluate_batch(micro_batches, trainer_->steps_done() + 1, sums, &predictions);
    std::vector<std::vector<at::Tensor>> on_host;
    for (const Values& one : predictions) {
      auto& made = on_host.emplace_back();
      for (const at::Tensor& tensor : one) made.push_back(tensor.cpu());
    }
    return on_host;
  }

  // Of the last step; empty before the first.
  py::dict last() const { return last_; }
  // Tells an exception that the last step counts.
  void tell_counted(const py::object& exception) const { tell(exception, counted()); }

  // Counts the step without an update, and returns true, if the batch has no counted target.
  bool pass_over(const std::vector<Fields>& micro_batches) {
    const Use use(*this);
    if (targets(micro_batches) > 0) return false;
    TrainingPosition position = trainer_->position();
    ++position.step;
    trainer_->go_on_from(position);
    return true;
  }

  // Copies of all weights and buffers, on every process, or of those with these names. `averaged`: of the
  // running means, if there are any.
  Fields weights(bool averaged, const std::set<std::string>& names) {
    const Use use(*this);
    const WithoutGil free;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (!averaged) {
      std::vector<LiveTensor> live = trainer_->update().live_weights();
      if (!names.empty()) std::erase_if(live, [&](const LiveTensor& one) { return !names.contains(one.name); });
      return copies(live);
    }
    Fields means;
    trainer_->with_averages([&] { means = copies(trainer_->update().live_weights()); });
    return means;
  }

  // The trained and frozen weights in this process's own memory, as far as they are contiguous, without
  // buffers of which each rank has a copy. Who writes to these tensors between two calls then calls written(). They
  // outlive the trainer. Each has its own storage, because writers of files take tensors of one storage for views of
  // each other.
  Fields shared_weights() {
    const Use use(*this);
    Fields shared;
    if (trainer_->world().process_count() > 1) return shared;  // ranks of others may have a copy
    for (const auto& [name, live, rank, first, frozen] : trainer_->update().live_weights()) {
      if (!first || !live.is_cpu() || !live.is_contiguous()) continue;
      shared[name] = at::from_blob(
          live.data_ptr(), live.sizes(), [kept = live](void*) {}, live.options());
    }
    return shared;
  }
  void written() {
    std::optional<Use> use;
    if (!reads_) use.emplace(*this);
    const WithoutGil free;
    trainer_->pipeline().on_ranks(
        [&](int rank) { trainer_->update().restored(rank, trainer_->update().optimizer_steps()); });
  }

  void load(const Fields& weights) {
    const Use use(*this);
    {
      const WithoutGil free;
      const Update& update = trainer_->update();
      check_everywhere(update.live_weights(), weights);
      write(update.live_weights(), weights, update.optimizer_steps());
    }
    run_handlers("the state is loaded");
  }

  // The same of the optimizer's state, under NAME.exp_avg and so on.
  Fields optimizer_state() {
    const Use use(*this);
    const WithoutGil free;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return copies(trainer_->update().live_optimizer_state());
  }

  // Also goes on from the given step.
  void load_optimizer_state(const Fields& state, int64_t steps) {
    const Use use(*this);
    {
      const WithoutGil free;
      const std::vector<LiveTensor> live = trainer_->update().live_optimizer_state();
      check_everywhere(live, state);
      write(live, state, steps);
      TrainingPosition position = trainer_->position();
      position.step = steps;
      trainer_->go_on_from(position);
    }
    run_handlers("the optimizer's state is loaded");
  }

  // Empty in all processes but one.
  std::string warning_of_cap() {
    if (!processes().is_first()) return "";
    return twobp::warning_of_cap(trainer_->pipeline(), trainer_->variant(), trainer_->micro_batches());
  }

  void save(const std::string& folder, const std::string& dtype) {
    const Use use(*this);
    {
      const WithoutGil free;
      const Config& config = trainer_->config();
      SaveModelOptions options;
      options.dtype = dtype;
      trainer_->with_averages(
          [&] { save_model(folder, config.model, config.data.sequence, trainer_->weights(), options, processes()); });
    }
    run_handlers("the model is saved");
  }

  void checkpoint(const std::string& folder, int64_t keep) {
    const Use use(*this);
    {
      const WithoutGil free;
      open_checkpoints(folder, keep, /*resume=*/false);
      checkpointer_->finish(*trainer_);
    }
    run_handlers("the checkpoint is written");
  }
  std::vector<std::string> resume(const std::string& folder, int64_t keep) {
    const Use use(*this);
    std::vector<std::string> notes;
    {
      const WithoutGil free;
      checkpointer_.reset();
      open_checkpoints(folder, keep, /*resume=*/true);
      notes = checkpointer_->resume(*trainer_);
    }
    run_handlers(concat("the trainer has resumed, with ", trainer_->steps_done(), " steps done"));
    return notes;
  }

  // Records the next step.
  void trace(const std::string& path) {
    const Use use(*this);
    const int64_t next = trainer_->steps_done() + 1;
    drawn_to_ = path;
    drawn_ = std::make_shared<TraceRecorder>(TraceSteps{next, next});
    trainer_->add_observer(drawn_);
  }

  // Also for a batch that evaluate() reads, as then nothing runs.
  void add_shape(const std::string& json, const Fields& constants, int variant) {
    std::optional<Use> use;
    if (!reads_) use.emplace(*this);
    graph::add_shape(*graph_, json, "the captured module", constants, variant);
  }

  // Of the captured module, for the micro-batches from here on; and the same for a batch that evaluate()
  // reads.
  void use_variant(int variant) {
    std::optional<Use> use;
    if (!reads_) use.emplace(*this);
    if (variant != graph_->variant()) trainer_->pipeline().forget_next();  // it has been computed with other programs
    graph_->use(variant);
  }
  void drop_variant(int variant) {
    std::optional<Use> use;
    if (!reads_) use.emplace(*this);
    graph_->drop(variant);
  }

  // The cost model for micro-batches like `example`, of so many samples, or like that of the trainer, as JSON.
  std::string costs(const std::vector<std::string>& recompute, const std::vector<int>& slices, double seconds,
                    const std::optional<Fields>& example, int64_t samples) {
    const Use use(*this);
    const WithoutGil free;
    const KeepThreads keep;
    MeasureOptions options;
    options.recompute = recompute;
    options.slices = slices;
    options.seconds = seconds;
    const Pipeline& pipeline = trainer_->pipeline();
    const World& world = trainer_->world();
    if (!world.devices.empty()) options.device = world.device(world.local_ranks().front()).where().index();
    if (!example)
      return cost_model_to_json(measure_costs(trainer_->config(), pipeline.model(), *trainer_->data().train, options));
    Config config = trainer_->config();
    config.pipeline.micro_batch_size = samples;
    const ExampleDataset data(as_read(*example, input_), samples, samples);
    return cost_model_to_json(measure_costs(config, pipeline.model(), data, options));
  }

  int process() const { return trainer_->world().process(); }
  // Of a step, over all replicas.
  int micro_batches() const { return trainer_->world().replicas * trainer_->micro_batches(); }
  int64_t micro_batch_size() const { return trainer_->config().pipeline.micro_batch_size; }
  int64_t steps_done() const { return trainer_->steps_done(); }
  int forwards_ahead() const { return trainer_->forwards_ahead(); }
  int ranks() const { return trainer_->pipeline().ranks(); }
  std::vector<int> split() const { return trainer_->pipeline().split(); }
  std::vector<std::string> layers() const {
    std::vector<std::string> names;
    for (const LayerSpec& layer : trainer_->pipeline().model().layers) names.push_back(layer.name);
    return names;
  }
  std::string config() const { return config_to_json(trainer_->config()); }

 private:
  friend class PyEvaluation;

  // Throws Error unless one thread of the process that made the trainer uses it.
  class Use {
   public:
    explicit Use(PyTrainer& of) : of_(of) {
      throw_if_python_exits();
      TWOBP_CHECK(of.process_ == ::getpid(),
                  "this process was forked after the trainer was made, and has none of its threads: make the "
                  "trainer in the process that uses it");
      TWOBP_CHECK(!of.used_.exchange(true),
                  "the trainer is in use by another thread, or by the evaluation that reads this batch: wait "
                  "for that call");
    }
    ~Use() { of_.used_ = false; }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    PyTrainer& of_;
  };

  // Adds the sums of a batch, and returns its targets on all replicas.
  int64_t evaluate_batch(const std::vector<Fields>& micro_batches, int64_t number, BatchEvaluation& sums,
                         std::vector<Values>* predictions = nullptr) {
    const Batch batch = checked_batch(micro_batches);
    const auto result = until_done("the evaluation was given up: it has changed nothing", [&] {
      const auto done = trainer_->evaluate(batch, number, predictions);
      if (!done) trainer_->go_on_from(trainer_->position());
      return done;
    });
    sums.loss += result.loss;
    if (result.right) sums.right = sums.right.value_or(0) + *result.right;
    return trainer_->world().replicas == 1 ? batch.targets : targets(micro_batches);
  }

  // On all replicas.
  int64_t targets(const std::vector<Fields>& micro_batches) const { return batch_of(micro_batches).targets; }

  // Each process is a rank. On GPUs, tensors go by NCCL, and the group carries what describes them.
  static World world_of(const PipelineConfig& config, c10::intrusive_ptr<c10d::ProcessGroup> group,
                        const Launcher& launcher) {
    const int ranks = pipeline_shape(config).ranks;
    const C10dOptions options{.channel = next_channel++};
    if (config.device == "cpu") return make_c10d_world(std::move(group), config.data_parallel, ranks, options);
    GpuProcess process{.count = group->getSize(), .local_rank = group->getRank()};
    check_processes(process.count, config.data_parallel, ranks);
    if (launcher.started_many()) process.local_rank = launcher.local_rank;
    const Ends hosts(1, [&](int) { return make_c10d_transport(std::move(group), options); });
    return make_gpu_world(start_options(config), process, hosts);
  }

  // The same where all replicas must have as many micro-batches.
  Batch checked_batch(const std::vector<Fields>& of_all) const {
    const size_t all = static_cast<size_t>(trainer_->world().replicas) * trainer_->micro_batches();
    TWOBP_CHECK(trainer_->config().pipeline.experts == 1 || of_all.size() == all, "the batch has ", of_all.size(),
                " micro-batches, but replicas that share experts need as many each: give ", all, " in all");
    return own_batch(of_all);
  }

  // This replica's share of a step's micro-batches, as a Loader gives it.
  Batch own_batch(const std::vector<Fields>& of_all) const {
    const int64_t begin = int64_t{trainer_->world().replica} * trainer_->micro_batches();
    const auto from = of_all.begin() + std::min<int64_t>(begin, of_all.size());
    const auto end = of_all.begin() + std::min<int64_t>(begin + trainer_->micro_batches(), of_all.size());
    return batch_of({from, end});
  }

  Batch batch_of(std::vector<Fields> given) const {
    for (Fields& fields : given) fields = as_read(std::move(fields), input_);
    return make_batch(std::move(given), trainer_->pipeline().model().count_targets);
  }

  Processes processes() const {
    const World& world = trainer_->world();
    return world.process_count() == 1 ? Processes() : Processes(*world.processes, trainer_->config().pipeline.timeout);
  }

  // Gives every process the tensors of all.
  void share(Fields& tensors) const {
    const Processes all = processes();
    if (all.count() == 1) return;
    nlohmann::json names = nlohmann::json::array();
    Values values;
    for (const auto& [name, tensor] : tensors) {
      names.push_back({name, static_cast<int>(tensor.scalar_type()), tensor.sizes().vec()});
      values.push_back(tensor);
    }
    const std::vector<std::string> of_all = all.to_first(names.dump());
    const std::vector<Values> values_of_all = all.tensors_to_first(values);
    names = nlohmann::json::array();
    for (size_t process = 0; process < of_all.size(); ++process) {
      const auto own = nlohmann::json::parse(of_all[process]);
      for (size_t i = 0; i < own.size(); ++i) {
        if (tensors.emplace(own[i][0].get<std::string>(), values_of_all[process][i]).second || process == 0)
          names.push_back(own[i]);
      }
    }
    for (const auto& one : nlohmann::json::parse(all.from_first(names.dump()))) {
      at::Tensor& tensor = tensors[one[0].get<std::string>()];
      if (!tensor.defined()) {
        tensor = at::empty(one[2].get<std::vector<int64_t>>(),
                           at::TensorOptions(static_cast<at::ScalarType>(one[1].get<int>())));
      }
      broadcast(*trainer_->world().processes, tensor, 0, all.timeout());
    }
  }

  // Of the tensors of all processes, on every process, in the CPU's memory.
  Fields copies(const std::vector<LiveTensor>& live) const {
    Fields copies;
    for (const LiveTensor& one : live) {
      if (!one.first) continue;
      copies[one.name] = one.tensor.detach().to(at::kCPU, one.tensor.scalar_type(), /*non_blocking=*/false,
                                                /*copy=*/true);
    }
    share(copies);
    return copies;
  }

  // Throws Error on every process if the state is wrong on one.
  void check_everywhere(const std::vector<LiveTensor>& live, const Fields& state) const {
    const Processes all = processes();
    nlohmann::json names = nlohmann::json::array();
    for (const LiveTensor& one : live) names.push_back(one.name);
    std::set<std::string> known;
    for (const std::string& text : all.to_first(names.dump())) {
      for (const auto& name : nlohmann::json::parse(text)) known.insert(name.get<std::string>());
    }
    std::string error;
    try {
      check_state(live, state);
      for (const auto& [name, tensor] : state) {
        TWOBP_CHECK(!all.is_first() || known.contains(name), "the state has ", name, ", which the model does not have");
      }
    } catch (const Error& wrong) {
      error = wrong.what();
    }
    for (const std::string& one : all.to_first(error)) error = error.empty() ? one : error;
    error = all.from_first(error);
    if (!error.empty()) fail(error);
  }

  void write(const std::vector<LiveTensor>& live, const Fields& tensors, int64_t optimizer_steps) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    trainer_->pipeline().on_ranks([&](int rank) {
      for (const LiveTensor& one : live) {
        if (one.rank == rank) one.tensor.copy_(tensors.at(one.name));
      }
      trainer_->update().restored(rank, optimizer_steps);
    });
  }

  void open_checkpoints(const std::string& folder, int64_t keep, bool resume) {
    if (checkpointer_ && folder == checkpoints_) return;
    SaveConfig save;
    save.checkpoints = folder;
    save.keep = keep;
    checkpointer_ = std::make_unique<Checkpointer>(save, resume, processes());
    checkpoints_ = folder;
  }

  void draw() {
    const auto drawn = std::move(drawn_);  // once, also if the file cannot be written
    const Variant& variant = trainer_->variant();
    const Pipeline& pipeline = trainer_->pipeline();
    Trace trace;
    trace.title = concat(pipeline.stages(), " stages, ", variant.schedule, " with p2 ", policy_name(variant.policy));
    trace.steps = drawn->reports();
    trace.slices = pipeline.slices();
    try {
      write_text(drawn_to_, trace_json(trace));
    } catch (const Error& error) {  // the step counts
      const std::string warning = concat("the trace was not written: ", error.what());
      if (PyErr_WarnEx(PyExc_UserWarning, warning.c_str(), 2) != 0) throw py::error_already_set();
    }
  }

  std::string counted() const {
    return concat("step ", trainer_->steps_done(), " counts: trainer.last_result has its result");
  }

  py::dict to_dict(const StepResult& result) const {
    const StepReport& report = result.report;
    py::dict out;
    out["step"] = result.step;
    out["loss"] = result.loss;
    out["lr"] = result.lr;
    out["grad_norm"] = result.grad_norm;
    out["skipped"] = result.skipped;
    out["step_seconds"] = report.seconds();
    std::vector<double> idle;
    std::vector<int64_t> peaks;
    for (size_t rank = 0; rank < report.ranks.size(); ++rank)
      idle.push_back(report.idle_fraction(static_cast<int>(rank)));
    for (const MemoryUse& rank : report.rank_memory) peaks.push_back(rank.peak);
    out["idle"] = idle;
    out["peak_bytes"] = peaks;
    py::dict experts;
    for (const ExpertTokens& layer : report.experts) experts[py::str(layer.layer)] = layer.tokens;
    out["experts"] = experts;
    return out;
  }

  pid_t process_;
  std::atomic<bool> used_{false};
  bool reads_ = false;  // an evaluation reads a batch
  py::dict last_;       // the result of the last step
  std::shared_ptr<graph::Graph> graph_;
  ModelInput input_;
  std::unique_ptr<Trainer> trainer_;
  std::unique_ptr<Checkpointer> checkpointer_;
  std::string checkpoints_;
  std::shared_ptr<TraceRecorder> drawn_;
  std::string drawn_to_;
};

// An evaluation, as a context of Python. The weights and their running means change places once, and back
// even if reading a batch raises.
class PyEvaluation {
 public:
  explicit PyEvaluation(PyTrainer& of) : of_(of) {}
  PyEvaluation& enter() {
    {
      const PyTrainer::Use use(of_);
      swap();
    }
    use_.emplace(of_);  // no other thread had the GIL in between
    of_.reads_ = true;
    return *this;
  }
  void exit(const py::object& raised, const py::args& /*rest*/) {
    of_.reads_ = false;
    try {
      swap();
      use_.reset();
    } catch (const std::exception&) {
      use_.reset();
      if (raised.is_none()) throw;  // otherwise the first error is the one to report
    }
  }
  // Adds a batch, a list of micro-batches.
  void add(const std::vector<Fields>& micro_batches) {
    of_.reads_ = false;
    targets_ += of_.evaluate_batch(micro_batches, ++batches_, sums_);
    of_.reads_ = true;
  }
  py::dict sums() const {
    py::dict out;
    out["loss"] = sums_.loss;
    out["targets"] = targets_;
    out["right"] = sums_.right ? py::object(py::int_(*sums_.right)) : py::none();
    return out;
  }

 private:
  void swap() {
    const Unlocked unlocked;
    of_.trainer_->update().swap_averages();
  }

  PyTrainer& of_;
  std::optional<PyTrainer::Use> use_;
  BatchEvaluation sums_;
  int64_t targets_ = 0;
  int64_t batches_ = 0;
};

}  // namespace

void add_trainer(py::module_& module) {
  py::class_<PyTrainer>(module, "Trainer")
      .def(py::init<const std::string&, const std::string&, const Fields&, const Fields&, const Fields&,
                    const std::string&>())
      .def("warning_of_cap", &PyTrainer::warning_of_cap)
      .def("step", &PyTrainer::step)
      .def("forward", &PyTrainer::forward)
      .def("last", &PyTrainer::last)
      .def("tell_counted", &PyTrainer::tell_counted)
      .def("pass_over", &PyTrainer::pass_over)
      .def("weights", &PyTrainer::weights, py::arg("averaged") = false, py::arg("names") = std::set<std::string>())
      .def("shared_weights", &PyTrainer::shared_weights)
      .def("written", &PyTrainer::written)
      .def("load", &PyTrainer::load)
      .def("optimizer_state", &PyTrainer::optimizer_state)
      .def("load_optimizer_state", &PyTrainer::load_optimizer_state)
      .def("save", &PyTrainer::save)
      .def("checkpoint", &PyTrainer::checkpoint)
      .def("resume", &PyTrainer::resume)
      .def("trace", &PyTrainer::trace)
      .def("add_shape", &PyTrainer::add_shape)
      .def("use_variant", &PyTrainer::use_variant)
      .def("drop_variant", &PyTrainer::drop_variant)
      .def("costs", &PyTrainer::costs)
      .def_property_readonly("process", &PyTrainer::process)
      .def_property_readonly("micro_batches", &PyTrainer::micro_batches)
      .def_property_readonly("micro_batch_size", &PyTrainer::micro_batch_size)
      .def_property_readonly("steps_done", &PyTrainer::steps_done)
      .def_property_readonly("forwards_ahead", &PyTrainer::forwards_ahead)
      .def_property_readonly("ranks", &PyTrainer::ranks)
      .def_property_readonly("split", &PyTrainer::split)
      .def_property_readonly("layers", &PyTrainer::layers)
      .def_property_readonly("config", &PyTrainer::config);
  py::class_<PyEvaluation>(module, "Evaluation")
      .def(py::init<PyTrainer&>(), py::keep_alive<1, 2>())
      .def("__enter__", &PyEvaluation::enter, py::return_value_policy::reference)
      .def("__exit__", &PyEvaluation::exit)
      .def("add", &PyEvaluation::add)
      .def("sums", &PyEvaluation::sums);
}

}  // namespace twobp::python
