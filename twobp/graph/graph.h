// A captured module: its layers with the names of their tensors, and their programs for each shape of a micro-batch.
// docs/bundle.md describes the file that it comes from.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "twobp/graph/liveness.h"
#include "twobp/graph/program.h"
#include "twobp/graph/sizes.h"
#include "twobp/nn/context.h"
#include "twobp/nn/parameter.h"

namespace twobp::graph {

using Tensors = std::map<std::string, at::Tensor>;

struct ParameterType {
  TensorType type;
  bool frozen = false;
  bool factor = false;  // of a product of matrices
  bool table = false;   // its rows are looked up
  Projections projections{};
};

// A parameter of a layer: one of the module's or, if there are several names, the rows of several, one below the other.
// They are all frozen or all trained.
struct LayerParameter {
  std::vector<std::string> names;
  ParameterType type;    // of the whole, with the dtype in which programs read it
  bool rounded = false;  // from the module's own dtype, once a step
};

// A piece of the module between two cuts.
struct GraphLayer {
  std::string name;
  int kind = 0;
  // The tensors to which the indices in the programs of the kind refer.
  std::vector<LayerParameter> parameters;
  std::vector<std::string> buffers;
  std::vector<std::string> constants;
};

// The programs for micro-batches with these fields, while the module is as it was when they were captured. A shape as
// the file has it may have `sizes`: then it stands for many, and bind() makes the one of a micro-batch.
struct Shape {
  // What must hold of the sizes.
  struct Guard {
    size_t entry = 0;  // of `sizes`
    std::string says;
  };
  struct Constant {
    std::string name;
    int table = -1;  // that computes it; -1: none
  };

  FieldTypes fields;  // with sizes that are kAnySize
  Sizes sizes;
  std::map<std::string, std::vector<std::optional<size_t>>> field_sizes;  // by dimension: its entry of `sizes`
  std::vector<Guard> guards;
  std::vector<Table> tables;
  std::vector<at::Tensor> table_values;  // of a bound shape
  std::vector<Program> programs;
  std::vector<int> kinds;                        // by layer: its program; empty: the kinds of the layers
  std::vector<std::vector<Constant>> constants;  // by layer; empty: those of the layers
  int variant = 0;                               // of the module
  Targets targets;
  int64_t positions = 0;  // of its sequences, if the programs take slices of them; else 0
  std::string no_slices;  // why they do not; empty if the file does not say
  // By program and trained parameters. Its graph makes and guards them.
  mutable std::map<std::pair<const Program*, std::vector<bool>>, Plan> plans;

  bool of_many() const { return sizes.count() > 0; }
};

// The parts of a captured module that do not depend on the shape of the micro-batch.
struct GraphDescription {
  std::string origin;    // the file, for messages
  std::string module;    // "transformers.GPT2LMHeadModel"
  std::string checksum;  // of the file
  at::ScalarType dtype = at::kFloat;
  std::string precision = "fp32";  // train.precision for which it was captured
  std::vector<std::string> kinds;
  std::vector<GraphLayer> layers;
  std::map<std::string, ParameterType> parameters;
  std::map<std::string, TensorType> buffers;
};

class Graph {
 public:
  // read_graph.h makes and checks all of this.
  Graph(GraphDescription description, Tensors constants)
      : description_(std::move(description)), constants_(std::move(constants)) {}

  const GraphDescription& description() const { return description_; }
  const std::vector<GraphLayer>& layers() const { return description_.layers; }

  // Adds programs for another shape of a micro-batch, with the constants that they need. Any thread may call the
  // functions from here on.
  void add(Shape shape, Tensors constants);
  // From here on, micro-batches run the programs of this variant of the module. Call it between steps.
  void use(int variant);
  int variant() const { return variant_; }
  // Forgets the shapes of a variant that is not used, and constants that no other shape reads. The first shape stays.
  // Call it between steps.
  void drop(int variant);
  // The first shape, which stands for one shape of a micro-batch.
  const Shape& shape() const;
  // The programs of the used variant for the micro-batch, bound to its sizes. The most recent ones are kept. Throws
  // Error that lists the known shapes.
  std::shared_ptr<const Shape> shape_of(const Fields& fields) const;
  // Whether there are programs for such micro-batches.
  bool serves(const FieldTypes& batch) const;
  // Whether there are programs for many shapes.
  bool of_many() const;
  // Whether the variant has a shape of exactly these fields.
  bool knows(const FieldTypes& fields, int variant) const;
  // The program of a layer.
  const Program& program(const Shape& shape, int layer) const;
  // The plan of a layer, which lives as long as the shape. `trained` says for each of its parameters whether it is
  // trained.
  const Plan& plan(const Shape& shape, int layer, const std::vector<bool>& trained) const;
  // The constants to which the indices in the layer's program refer.
  std::vector<at::Tensor> constants(const Shape& shape, int layer) const;
  bool has_constant(const std::string& name) const;
  // Rises when shapes are dropped, so that nothing that was made for them stays.
  uint64_t dropped() const;
  // Counts the targets of a micro-batch.
  int64_t count_targets(const Fields& fields) const;

 private:
  struct Found {
    std::shared_ptr<const Shape> shape;
    uint64_t last_use = 0;
  };

  std::shared_ptr<const Shape> find(const FieldTypes& batch) const;
  void forget_oldest(const Shape* but) const;

  GraphDescription description_;
  mutable std::mutex mutex_;  // guards the rest
  Tensors constants_;
  std::vector<std::shared_ptr<const Shape>> shapes_;
  int variant_ = 0;                                            // the one that is used
  uint64_t dropped_ = 0;                                       // how many times shapes were dropped
  mutable std::map<std::pair<int, FieldTypes>, Found> found_;  // for recent micro-batches, by variant
  mutable uint64_t uses_ = 0;                                  // of found_
};

// Whether a tensor of this type may be a field. `type` may have sizes that are kAnySize.
bool may_be(const TensorType& type, const TensorType& field);

// `shape` with the numbers and tables of micro-batches of these fields, which have its fields' types. Null if it has no
// programs for them, and then `why` is the reason. Throws Error if a table cannot be computed.
std::shared_ptr<Shape> bind(const Shape& shape, const FieldTypes& batch, const Tensors& constants, std::string& why);

}  // namespace twobp::graph
