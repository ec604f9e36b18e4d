// The list of layers under test.
#include "tests/nn/layer_cases.h"

#include <ATen/Parallel.h>

#include "tests/nn/reference.h"
#include "twobp/core/random.h"
#include "twobp/nn/layer.h"
#include "twobp/nn/layers/activations.h"
#include "twobp/nn/layers/attention.h"
#include "twobp/nn/layers/attention_inputs.h"
#include "twobp/nn/layers/embedding.h"
#include "twobp/nn/layers/experts.h"
#include "twobp/nn/layers/latent_projections.h"
#include "twobp/nn/layers/linear.h"
#include "twobp/nn/layers/losses.h"
#include "twobp/nn/layers/norms.h"
#include "twobp/nn/layers/residual.h"
#include "twobp/nn/layers/squared_error.h"

namespace twobp::test {
namespace {

using Weights = std::vector<at::Tensor>;

constexpr double kStd = 0.5;
constexpr double kEps = 0.25;  // large enough to matter; smooth enough for finite differences

std::unique_ptr<Layer> linear(std::vector<ParameterPart> parts, int64_t in, at::ScalarType dtype) {
  return std::make_unique<Linear>(std::move(parts), in, kStd, dtype);
}

auto sizes(std::vector<int64_t> per_sample) {
  return [per_sample](int64_t samples) {
    std::vector<int64_t> out = {samples};
    out.insert(out.end(), per_sample.begin(), per_sample.end());
    return out;
  };
}

LayerCase embedding_case(const std::string& name, int64_t vocab, int64_t dim, int64_t positions, double scale = 1) {
  LayerCase c;
  c.name = name;
  c.make = [=](at::ScalarType dtype) {
    return std::make_unique<Embedding>("e", vocab, dim, kStd, dtype, /*padding=*/-1, scale);
  };
  c.fields = [=](int64_t samples, uint64_t seed, at::ScalarType) {
    return Fields{{"input_ids", random_ids({samples, positions}, vocab, seed)}};
  };
  c.reference = [=](const at::Tensor&, const Weights& w, const Fields& fields) {
    return at::embedding(w[0], fields.at("input_ids")) * scale;
  };
  c.roundings =
      2.0 * static_cast<double>(positions) + (scale == 1 ? 0 : 2);  // a token repeats at most once per position
  return c;
}

LayerCase linear_case(const std::string& name, std::vector<int64_t> per_sample, std::vector<ParameterPart> parts,
                      double rows) {
  LayerCase c;
  c.name = name;
  const int64_t in = per_sample.back();
  c.make = [=](at::ScalarType dtype) { return linear(parts, in, dtype); };
  c.input = sizes(per_sample);
  c.reference = [](const at::Tensor& x, const Weights& w, const Fields&) { return reference::linear(x, w[0]); };
  double out = 0;
  for (const auto& part : parts) out += static_cast<double>(part.rows);
  c.roundings = std::max({rows, out, static_cast<double>(in)});
  return c;
}

LayerCase transposed_linear_case() {
  LayerCase c;
  c.name = "LinearTransposed";
  c.make = [](at::ScalarType dtype) {
    return std::make_unique<Linear>(std::vector<ParameterPart>{{"w", 7}}, 5, kStd, dtype, /*bias=*/true,
                                    /*transposed=*/true);
  };
  c.input = sizes({3, 5});
  c.reference = [](const at::Tensor& x, const Weights& w, const Fields&) { return at::matmul(x, w[0]) + w[1]; };
  c.roundings = 8;
  return c;
}

// Returns the position where the document of each position begins. Some documents have one token, some many.
at::Tensor random_starts(int64_t samples, int64_t positions, uint64_t seed) {
  SplitMix64 random(seed);
  at::Tensor starts = at::empty({samples, positions}, at::kLong);
  for (int64_t b = 0; b < samples; ++b) {
    for (int64_t begin = 0; begin < positions;) {
      const int64_t length = 1 + static_cast<int64_t>(bounded(random, static_cast<uint64_t>(positions)));
      const int64_t end = std::min(positions, begin + (b % 2 == 0 ? length : 1 + length / 4));
      starts[b].narrow(0, begin, end - begin).fill_(begin);
      begin = end;
    }
  }
  return starts;
}

LayerCase positions_case(const std::string& name, int64_t positions, int64_t dim, bool documents = false) {
  LayerCase c;
  c.name = name;
  c.make = [=](at::ScalarType dtype) {
    return std::make_unique<LearnedPositions>("p", positions + 2, dim, kStd, dtype);
  };
  c.input = sizes({positions, dim});
  c.fields = [=](int64_t samples, uint64_t seed, at::ScalarType) {
    return documents ? Fields{{kDocumentStarts, random_starts(samples, positions, seed)}} : Fields{};
  };
  c.reference = [=](const at::Tensor& x, const Weights& w, const Fields& fields) {
    const at::Tensor all = at::arange(positions, at::kLong);
    return x + at::embedding(w[0], documents ? all - fields.at(kDocumentStarts) : all);
  };
  // The sum over the samples, and over their documents.
  c.roundings = 4 + static_cast<double>(documents ? positions : 0);
  return c;
}

LayerCase query_key_norm_case(const std::string& name, const QueryKeyNormShape& shape, int64_t positions,
                              GainForm form) {
  LayerCase c;
  c.name = name;
  c.make = [=](at::ScalarType dtype) { return std::make_unique<QueryKeyNorm>("q", "k", shape, kEps, dtype, form); };
  const int64_t queries = shape.heads * shape.head_dim, keys = shape.kv_heads * shape.head_dim;
  c.input = sizes({positions, queries + 2 * keys});
  c.reference = [=](const at::Tensor& x, const Weights& w, const Fields&) {
    const auto part = [&](int64_t first, int64_t count, const at::Tensor& weight) {
      const at::Tensor gain = form == GainForm::kWeight ? weight : 1 + weight;
      const at::Tensor norms = x.narrow(2, first, count).unflatten(2, {-1, gain.numel()});
      return reference::rms_norm(norms, gain, kEps).flatten(2);
    };
    return at::cat({part(0, queries, w[0]), part(queries, keys, w[1]), x.narrow(2, queries + keys, keys)}, 2);
  };
  // As for RmsNorm, with the heads of 64 rows in a block.
  c.roundings = static_cast<double>(std::max(queries, 64 * shape.heads)) + 12;
  return c;
}

LayerCase rms_norm_case(const std::string& name, int64_t positions, int64_t dim, GainForm form = GainForm::kWeight) {
  LayerCase c;
  c.name = name;
  c.make = [=](at::ScalarType dtype) { return std::make_unique<RmsNorm>("g", dim, kEps, dtype, form); };
  c.input = sizes({positions, dim});
  c.reference = [=](const at::Tensor& x, const Weights& w, const Fields&) {
    return reference::rms_norm(x, form == GainForm::kWeight ? w[0] : 1 + w[0], kEps);
  };
  // The mean sums dim numbers. The gain's gradient sums rows up to a block of 64, and then blocks. About 10 more
  // operations are involved.
  c.roundings = static_cast<double>(std::max<int64_t>(dim, 64)) + 12;
  return c;
}

LayerCase attention_case(const std::string& name, const AttentionShape& shape, int64_t positions, bool padded = false,
                         bool documents = false, bool sinks = false) {
  LayerCase c;
  c.name = name;
  c.make = [=](at::ScalarType dtype) {
    return std::make_unique<Attention>(shape, dtype, 0, "attention", sinks ? "sinks" : "", kStd);
  };
  c.input = sizes({positions, shape.packed()});
  c.fields = [=](int64_t samples, uint64_t seed, at::ScalarType) {
    Fields fields;
    if (padded) fields["attention_mask"] = random_mask(samples, positions, seed);
    if (documents) fields[kDocumentStarts] = random_starts(samples, positions, seed);
    return fields;
  };
  c.reference = [=](const at::Tensor& x, const Weights& w, const Fields& fields) {
    return reference::attention(x, shape, padded ? fields.at("attention_mask") : at::Tensor(),
                                documents ? fields.at(kDocumentStarts) : at::Tensor(), sinks ? w[0] : at::Tensor());
  };
  // Scores (D), softmax and its sum (S), and values (S), all again in the backward pass, and the queries of a group.
  // ATen's exp is within 20 ulp. Rotations and scalings take about 20 operations.
  c.roundings = static_cast<double>(2 * shape.head_dim + 4 * positions + shape.heads / shape.kv_heads) + 60;
  if (sinks) c.roundings += 64 + static_cast<double>(shape.head_dim);  // the sum over blocks of rows
  return c;
}

// The features that turn lie side by side in pairs, or in halves as in the result.
LayerCase latent_case(const std::string& name, const LatentShape& shape, int64_t positions) {
  LayerCase c;
  c.name = name;
  const int64_t heads = shape.heads, dim = shape.head_dim(), nope = shape.nope_dim, turning = shape.rope_dim;
  const auto up = [](const std::string& part, int64_t rank, int64_t rows, at::ScalarType dtype) {
    return make_sequential(std::make_unique<RmsNorm>(part + ".norm", rank, kEps, dtype),
                           linear({{part, rows}}, rank, dtype));
  };
  c.make = [=](at::ScalarType dtype) {
    std::unique_ptr<Layer> query;
    if (shape.q_rank > 0) query = up("q", shape.q_rank, heads * dim, dtype);
    return std::make_unique<LatentProjections>(shape, std::move(query),
                                               up("kv", shape.kv_rank, heads * (nope + shape.value_dim), dtype));
  };
  c.input = sizes({positions, shape.input()});
  c.reference = [=](const at::Tensor& x, const Weights& w, const Fields&) {
    const auto of = [&](int64_t first, int64_t rank, size_t weight) {
      return reference::linear(reference::rms_norm(x.narrow(2, first, rank), w[weight], kEps), w[weight + 1])
          .unflatten(2, {heads, -1});
    };
    const auto halves = [&](const at::Tensor& r) {
      if (!shape.interleaved) return r;
      return at::cat({r.slice(-1, 0, turning, 2), r.slice(-1, 1, turning, 2)}, -1);
    };
    const bool ranked = shape.q_rank > 0;
    const at::Tensor q = ranked ? of(0, shape.q_rank, 0) : x.narrow(2, 0, heads * dim).unflatten(2, {heads, dim});
    const at::Tensor kv = of(shape.query_width(), shape.kv_rank, ranked ? 2 : 0);
    const at::Tensor r = x.narrow(2, shape.query_width() + shape.kv_rank, turning).unsqueeze(2);
    const at::Tensor q_turned = at::cat({q.narrow(3, 0, nope), halves(q.narrow(3, nope, turning))}, 3);
    const at::Tensor k = at::cat({kv.narrow(3, 0, nope), halves(r).expand({-1, -1, heads, -1})}, 3);
    return at::cat({q_turned.flatten(2), k.flatten(2), kv.narrow(3, nope, shape.value_dim).flatten(2)}, 2);
  };
  // As for RmsNorm and Linear, and the sum over heads.
  const int64_t widest = std::max({shape.q_rank, shape.kv_rank, heads * (dim + shape.value_dim), int64_t{64}});
  c.roundings = static_cast<double>(2 * widest + 2 * positions + heads) + 24;
  return c;
}

LayerCase gated_case(const std::string& name, Gate gate, int64_t positions, int64_t cols) {
  LayerCase c;
  c.name = name;
  c.make = [=](at::ScalarType) { return std::make_unique<GatedUnit>(gate); };
  c.input = sizes({positions, 2 * cols});
  c.reference = [=](const at::Tensor& x, const Weights&, const Fields&) {
    if (gate == Gate::kSilu) return reference::swiglu(x);
    return at::gelu(x.narrow(-1, 0, cols), gate == Gate::kGelu ? "none" : "tanh") * x.narrow(-1, cols, cols);
  };
  // SiLU: exp within 4 ulp (8 roundings) and fewer than 12 operations. Else as GELU, and the products.
  c.roundings = gate == Gate::kSilu ? 20 : 44;
  return c;
}

LayerCase cross_entropy_case(const std::string& name, int64_t positions, int64_t vocab, const LogitsForm& form = {}) {
  LayerCase c;
  c.name = name;
  c.make = [=](at::ScalarType) { return std::make_unique<CrossEntropy>(form); };
  c.input = sizes({positions, vocab});
  c.loss_weight = 0.25;
  c.fields = [=](int64_t samples, uint64_t seed, at::ScalarType) {
    at::Tensor labels = random_ids({samples, positions}, vocab, seed);
    labels.view({-1})[1].fill_(-100);  // one in the middle, and the last one
    labels.view({-1})[-1].fill_(-100);
    return Fields{{"labels", labels}};
  };
  c.reference = [=](const at::Tensor& x, const Weights&, const Fields& fields) {
    const at::Tensor logits = reference::soft_cap(x * form.scale, form.cap);
    return reference::cross_entropy(logits, fields.at("labels"), 0.25);
  };
  // The sum over the vocabulary. Logits differ by up to 8, which exp turns into that many additional roundings. exp
  // itself is within 4 ulp. About 10 more operations are involved.
  c.roundings = static_cast<double>(vocab) + 26 + (form.cap > 0 ? 20 : 0);
  return c;
}

LayerCase squared_error_case(const std::string& name, int64_t positions, int64_t dim) {
  LayerCase c;
  c.name = name;
  c.make = [](at::ScalarType) { return std::make_unique<SquaredError>(); };
  c.input = sizes({positions, dim});
  c.loss_weight = 0.25;
  c.fields = [=](int64_t samples, uint64_t seed, at::ScalarType dtype) {
    return Fields{{"target", random({samples, positions, dim}, seed + 5, dtype)}};
  };
  c.reference = [](const at::Tensor& x, const Weights&, const Fields& fields) {
    const double numbers = static_cast<double>(x.numel() / x.size(0));
    return (x - fields.at("target")).square().sum() / (2 * numbers) * 0.25;
  };
  c.roundings = static_cast<double>(2 * positions * dim) + 4;  // the sum of squares
  return c;
}

// The references compute all experts for every token. With biases and the limited gate:
LayerCase limited_experts_case(const std::string& name, const ExpertsShape& shape, int64_t positions) {
  LayerCase c;
  c.name = name;
  c.make = [=](at::ScalarType dtype) {
    return std::make_unique<Experts>(ExpertsNames{"router", "expert", "gate", "up", "down"}, shape, kStd, dtype);
  };
  c.input = sizes({positions, shape.dim});
  c.reference = [=](const at::Tensor& x, const Weights& w, const Fields&) {
    const at::Tensor logits = reference::linear(x, w[0]) + w[1];
    const auto [largest, chosen] = at::topk(logits, shape.chosen, -1);
    const at::Tensor weights = at::zeros_like(logits).scatter(-1, chosen, at::softmax(largest, -1));
    const at::Tensor input = w[2].view({shape.experts, -1, shape.dim});
    const at::Tensor output = w[4].view({shape.experts, shape.dim, -1});
    at::Tensor sum = at::zeros_like(x);
    for (int64_t e = 0; e < shape.experts; ++e) {
      const at::Tensor packed = reference::linear(x, input[e]) + w[3].view({shape.experts, -1})[e];
      const at::Tensor gate = at::clamp_max(packed.narrow(-1, 0, shape.hidden), shape.gate_limit);
      const at::Tensor up =
          at::clamp(packed.narrow(-1, shape.hidden, shape.hidden), -shape.gate_limit, shape.gate_limit);
      const at::Tensor act = (up + 1) * gate * at::sigmoid(1.702 * gate);
      const at::Tensor y = reference::linear(act, output[e]) + w[5].view({shape.experts, -1})[e];
      sum = sum + weights.select(-1, e).unsqueeze(-1) * y;
    }
    return sum;
  };
  c.roundings = static_cast<double>(2 * positions + 4 * shape.hidden + 4 * shape.dim + shape.experts) + 80;
  return c;
}

// Shows the tests only what is trained. The correction, the second parameter, has these numbers.
at::Tensor correction_of(int64_t experts) {
  return at::sin(at::arange(experts, at::kDouble) * 2) * 0.5;
}

class TrainedExperts : public Layer {
 public:
  TrainedExperts(std::unique_ptr<Experts> layer, int64_t experts) : layer_(std::move(layer)) {
    layer_->collect_parameters(all_);
    all_[1]->allocate_value(1);
    all_[1]->value.copy_(correction_of(experts));
  }
  Values forward(Values x, Context& context, Saved& saved) override {
    all_[1]->move_to(x[0].device());
    return layer_->forward(std::move(x), context, saved);
  }
  Values backward_p1(Values dy, Context& context, Saved& saved) override {
    return layer_->backward_p1(std::move(dy), context, saved);
  }
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override { layer_->collect_p2(saved, units); }
  void collect_parameters(std::vector<Parameter*>& parameters) override {
    for (Parameter* parameter : all_)
      if (parameter->trainable()) parameters.push_back(parameter);
  }

 private:
  std::unique_ptr<Experts> layer_;
  std::vector<Parameter*> all_;
};

LayerCase experts_case(const std::string& name, const ExpertsShape& shape, int64_t positions, int64_t shared = 0) {
  LayerCase c;
  c.name = name;
  c.make = [=](at::ScalarType dtype) -> std::unique_ptr<Layer> {
    std::unique_ptr<Layer> of_all;
    ExpertsNames names{"router", "expert", "gate", "up", "down"};
    if (shape.sigmoid) names.correction = "correction";
    if (shared > 0) {
      of_all = std::make_unique<Switched>(
          linear({{"switch", 1}}, shape.dim, dtype),
          make_sequential(linear({{"shared", 2 * shared}}, shape.dim, dtype), std::make_unique<GatedUnit>(shape.gate),
                          linear({{"out", shape.dim}}, shared, dtype)));
    }
    auto layer = std::make_unique<Experts>(names, shape, kStd, dtype, std::move(of_all));
    if (!shape.sigmoid) return layer;
    return std::make_unique<TrainedExperts>(std::move(layer), shape.experts);
  };
  c.input = sizes({positions, shape.dim});
  c.reference = [=](const at::Tensor& x, const Weights& w, const Fields&) {
    const at::Tensor logits = reference::linear(x, w[0]);
    const at::Tensor scores = shape.sigmoid ? at::sigmoid(logits) : at::softmax(logits, -1);
    at::Tensor ranks = shape.sigmoid ? scores + correction_of(shape.experts) : scores;
    if (shape.groups > 1) {
      const at::Tensor by_group = std::get<0>(at::sort(ranks.unflatten(-1, {shape.groups, -1}), -1, true));
      const at::Tensor best = by_group.narrow(-1, 0, shape.sigmoid ? 2 : 1).sum(-1);
      const at::Tensor groups = std::get<1>(at::topk(best, shape.chosen_groups, -1));
      const at::Tensor seen = at::zeros_like(best).scatter(-1, groups, 1);
      ranks = ranks - 100 * (1 - seen).repeat_interleave(shape.experts / shape.groups, -1);
    }
    const at::Tensor chosen = at::zeros_like(scores).scatter_(-1, std::get<1>(at::topk(ranks, shape.chosen, -1)), 1);
    at::Tensor weights = scores * chosen;
    if (shape.normalized) weights = weights / weights.sum(-1, true);
    weights = weights * shape.scale;
    const at::Tensor up = w[1].view({shape.experts, -1, shape.dim});
    const at::Tensor down = w[2].view({shape.experts, shape.dim, -1});
    at::Tensor sum = at::zeros_like(x);
    for (int64_t e = 0; e < shape.experts; ++e) {
      const at::Tensor act = reference::swiglu(reference::linear(x, up[e]));
      sum = sum + weights.select(-1, e).unsqueeze(-1) * reference::linear(act, down[e]);
    }
    if (shared == 0) return sum;
    const at::Tensor of_all = reference::linear(reference::swiglu(reference::linear(x, w[3])), w[4]);
    return sum + at::sigmoid(reference::linear(x, w[5])) * of_all;
  };
  c.roundings = static_cast<double>(2 * positions + 4 * shape.hidden + 4 * shared + 4 * shape.dim + shape.experts) + 60;
  return c;
}

ExpertsShape of_groups(ExpertsShape shape, int64_t groups, int64_t chosen, double scale, bool sigmoid) {
  shape.groups = groups;
  shape.chosen_groups = chosen;
  shape.scale = scale;
  shape.sigmoid = sigmoid;
  return shape;
}

AttentionShape with_values(int64_t head_dim, int64_t value_dim) {
  AttentionShape shape{3, 3, head_dim, {100}, 4, 0, 0.4};
  shape.value_dim = value_dim;
  shape.rotary_last = true;
  return shape;
}

LayerCase residual_case() {
  LayerCase c;
  c.name = "ResidualOfLinear";
  c.make = [](at::ScalarType dtype) { return std::make_unique<Residual>(linear({{"w", 5}}, 5, dtype)); };
  c.input = sizes({3, 5});
  c.reference = [](const at::Tensor& x, const Weights& w, const Fields&) { return x + reference::linear(x, w[0]); };
  c.roundings = 6 + 5 + 1;
  return c;
}

LayerCase scaled_residual_case() {
  LayerCase c = residual_case();
  c.name = "ResidualScaled";
  c.make = [](at::ScalarType dtype) { return std::make_unique<Residual>(linear({{"w", 5}}, 5, dtype), 0.3); };
  c.reference = [](const at::Tensor& x, const Weights& w, const Fields&) {
    return x + 0.3 * reference::linear(x, w[0]);
  };
  c.roundings += 2;
  return c;
}

// Two branches of the same x.
LayerCase residual_join_case() {
  LayerCase c;
  c.name = "ResidualJoin";
  c.make = [](at::ScalarType dtype) {
    return make_sequential(std::make_unique<ResidualBegin>(linear({{"first", 5}}, 5, dtype)),
                           std::make_unique<ResidualJoin>(linear({{"second", 5}}, 5, dtype)));
  };
  c.input = sizes({3, 5});
  c.reference = [](const at::Tensor& x, const Weights& w, const Fields&) {
    return x + reference::linear(x, w[0]) + reference::linear(x, w[1]);
  };
  c.roundings = 2 * 6 + 5 + 2;
  return c;
}

// The same half in two layers, so that a stage may end between them.
LayerCase residual_halves_case() {
  LayerCase c;
  c.name = "ResidualInHalves";
  c.make = [](at::ScalarType dtype) {
    return make_sequential(std::make_unique<ResidualBegin>(linear({{"begin", 7}}, 5, dtype)),
                           std::make_unique<ResidualEnd>(linear({{"end", 5}}, 7, dtype)));
  };
  c.input = sizes({3, 5});
  c.reference = [](const at::Tensor& x, const Weights& w, const Fields&) {
    return x + reference::linear(reference::linear(x, w[0]), w[1]);
  };
  c.roundings = 2 * (5 + 7) + 6 + 1;
  return c;
}

// A LLaMa block's MLP half with odd sizes, then a plain residual and a norm. So containers are nested.
LayerCase nested_case(const std::string& name, int64_t positions, int64_t dim, int64_t hidden) {
  LayerCase c;
  c.name = name;
  c.make = [=](at::ScalarType dtype) -> std::unique_ptr<Layer> {
    auto branch = make_sequential(std::make_unique<RmsNorm>("g0", dim, kEps, dtype),
                                  linear({{"gate", hidden}, {"up", hidden}}, dim, dtype),
                                  std::make_unique<GatedUnit>(Gate::kSilu), linear({{"down", dim}}, hidden, dtype));
    return make_sequential(std::make_unique<Residual>(std::move(branch)),
                           std::make_unique<Residual>(linear({{"w", dim}}, dim, dtype)),
                           std::make_unique<RmsNorm>("g1", dim, kEps, dtype));
  };
  c.input = sizes({positions, dim});
  c.reference = [](const at::Tensor& x, const Weights& w, const Fields&) {
    const at::Tensor act = reference::swiglu(reference::linear(reference::rms_norm(x, w[0], kEps), w[1]));
    const at::Tensor y = x + reference::linear(act, w[2]);
    return reference::rms_norm(y + reference::linear(y, w[3]), w[4], kEps);
  };
  // Forward and backward of 6 layers with sums of dim or hidden numbers, 20 elementwise operations, and the rows.
  c.roundings = static_cast<double>(4 * (3 * dim + 3 * hidden) + 2 * positions) + 12 * 20;
  return c;
}

// One thread, as on a rank. At these sizes, a second thread would only wait. ThreadFacts sets other numbers of threads.
class OneThread : public testing::Environment {
  void SetUp() override { at::set_num_threads(1); }
};
const testing::Environment* const one_thread = testing::AddGlobalTestEnvironment(new OneThread);

INSTANTIATE_TEST_SUITE_P(Nn, EveryLayer, testing::ValuesIn(layer_cases()),
                         [](const testing::TestParamInfo<LayerCase>& info) { return info.param.name; });

}  // namespace

at::Tensor LayerCase::make_input(int64_t samples, uint64_t seed, at::ScalarType dtype) const {
  return input ? random(input(samples), seed, dtype) : at::Tensor();
}

at::Tensor LayerCase::make_gradient(const at::Tensor& y, uint64_t seed) const {
  return is_loss() ? at::Tensor() : random(y.sizes(), seed + 1000, y.scalar_type());
}

std::unique_ptr<MicroBatch> LayerCase::micro_batch(Layer& layer, int64_t samples, uint64_t seed, at::ScalarType dtype,
                                                   int64_t index) const {
  return std::make_unique<MicroBatch>(layer, fields ? fields(samples, seed, dtype) : Fields{}, index,
                                      is_loss() ? loss_weight : 1);
}

const std::vector<LayerCase>& layer_cases() {
  static const std::vector<LayerCase> cases = {
      embedding_case("Embedding", 4, 5, 7),  // 14 tokens from 4 values: repeated
      embedding_case("EmbeddingLarge", 131, 33, 65),
      embedding_case("EmbeddingScaled", 4, 5, 7, 1.7),
      positions_case("LearnedPositions", 3, 5),
      positions_case("LearnedPositionsLarge", 65, 33),
      linear_case("Linear", {3, 5}, {{"w", 7}}, 6),
      linear_case("LinearOnMatrix", {5}, {{"w", 7}}, 2),
      linear_case("LinearPacked", {3, 5}, {{"q", 4}, {"k", 1}, {"v", 2}}, 6),
      linear_case("LinearLarge", {65, 67}, {{"w", 71}}, 130),
      transposed_linear_case(),
      rms_norm_case("RmsNorm", 3, 5),
      rms_norm_case("RmsNormOnePlus", 3, 5, GainForm::kOnePlusWeight),
      rms_norm_case("RmsNormOneColumn", 3, 1),
      rms_norm_case("RmsNormWholeBlocks", 64, 17),
      rms_norm_case("RmsNormLarge", 65, 33),  // blocks of 64, 64 and 2 rows
      attention_case("Attention", {2, 2, 4, 100}, 3),
      attention_case("AttentionGrouped", {4, 2, 6, 100}, 5),
      attention_case("AttentionOneKeyHead", {3, 1, 2, 100}, 4),
      attention_case("AttentionOnePosition", {2, 1, 4, 100}, 1),
      attention_case("AttentionLarge", {4, 2, 18, 10000}, 133),
      attention_case("AttentionPadded", {4, 2, 6, 100}, 7, true),
      attention_case("AttentionPaddedLarge", {4, 2, 18, 10000}, 133, true),
      attention_case("AttentionUnrotated", {3, 1, 3, {100}, 0}, 4),
      attention_case("AttentionPartlyRotated", {4, 2, 7, {100}, 4}, 5),
      attention_case("AttentionWindow", {4, 2, 6, {100}, -1, 3}, 7),
      attention_case("AttentionWindowOfOne", {4, 2, 6, {100}, -1, 1}, 7),
      attention_case("AttentionWindowLarge", {4, 2, 18, {10000}, -1, 50}, 133),
      attention_case("AttentionWindowPadded", {4, 2, 6, {100}, -1, 2}, 7, true),
      attention_case("AttentionDocuments", {4, 2, 6, {100}}, 7, false, true),
      attention_case("AttentionDocumentsLarge", {4, 2, 18, {10000}}, 133, false, true),
      attention_case("AttentionDocumentsInWindowsPadded", {4, 2, 6, {100}, -1, 20}, 70, true, true),
      positions_case("LearnedPositionsOfDocuments", 9, 5, true),
      attention_case("AttentionSinks", {4, 2, 6, 100}, 5, false, false, true),
      attention_case("AttentionSinksPaddedInWindows", {4, 2, 6, {100}, -1, 20}, 70, true, true, true),
      attention_case("AttentionScaledAndCapped", {4, 2, 6, {100}, -1, 0, 0.7, 1.5}, 5),
      attention_case("AttentionInterleaved", {3, 3, 6, {100}, 2, 0, 0, 0, true}, 5),
      attention_case("AttentionOfNarrowValues", with_values(6, 4), 5),
      attention_case("AttentionOfWideValuesLarge", with_values(14, 18), 133, true),
      latent_case("LatentProjections", {2, 3, 4, 5, 0, 7, true}, 3),
      latent_case("LatentProjectionsOfCompressedQueries", {3, 2, 6, 3, 5, 4, true}, 3),
      latent_case("LatentProjectionsInHalvesLarge", {4, 17, 6, 11, 33, 37, false}, 65),
      attention_case("AttentionOfAllKinds", {2, 2, 18, {100}, 8, 70, 0.3, 2.5, true}, 133, true),
      query_key_norm_case("QueryKeyNorm", {4, 2, 5, false}, 3, GainForm::kWeight),
      query_key_norm_case("QueryKeyNormWhole", {2, 1, 5, true}, 3, GainForm::kOnePlusWeight),
      query_key_norm_case("QueryKeyNormLarge", {3, 1, 18, false}, 65, GainForm::kWeight),
      gated_case("SwiGlu", Gate::kSilu, 3, 5),
      gated_case("GeGlu", Gate::kGelu, 3, 5),
      gated_case("GeGluTanhLarge", Gate::kGeluTanh, 65, 137),
      gated_case("SwiGluLarge", Gate::kSilu, 65, 137),
      cross_entropy_case("CrossEntropy", 3, 7),
      cross_entropy_case("CrossEntropyLarge", 65, 131),
      cross_entropy_case("CrossEntropyScaledAndCapped", 3, 7, {0.6, 1.5}),
      squared_error_case("SquaredError", 3, 5),
      squared_error_case("SquaredErrorLarge", 65, 17),
      experts_case("Experts", {5, 3, 4, 2, false}, 3),
      experts_case("ExpertsNormalized", {5, 3, 4, 3, true}, 3),
      experts_case("ExpertsOneChosen", {5, 3, 2, 1, false}, 3),
      experts_case("ExpertsAndShared", {5, 3, 4, 2, true}, 3, 4),
      limited_experts_case("ExpertsLimited", {5, 3, 4, 2, true, Gate::kSilu, true, 0.8}, 4),
      experts_case("ExpertsOfGroups", of_groups({5, 3, 8, 2, false}, 4, 2, 1.7, false), 3),
      experts_case("ExpertsOfSigmoidGroups", of_groups({5, 3, 8, 3, true}, 4, 2, 2.5, true), 3, 4),
      experts_case("ExpertsOfSigmoidScores", of_groups({5, 3, 8, 4, false}, 1, 1, 0.7, true), 4),
      experts_case("ExpertsLarge", {33, 17, 16, 4, true}, 65),
      residual_case(),
      scaled_residual_case(),
      residual_join_case(),
      residual_halves_case(),
      nested_case("Nested", 3, 5, 7),
      nested_case("NestedLarge", 65, 33, 71),
  };
  return cases;
}

}  // namespace twobp::test
