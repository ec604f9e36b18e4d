// Cases of attention that ATen's fused kernels compute, for those of a GPU and for stand-ins on a CPU.
#pragma once

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include "twobp/graph/apart_attention.h"
#include "twobp/nn/kernels/attention/packed_attention.h"
#include "twobp/nn/kernels/rows/operators.h"

namespace twobp::test {

// Random numbers that the dtype can hold, in float64.
inline at::Tensor numbers(at::IntArrayRef sizes, int seed, at::ScalarType type) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::kDouble).to(type).to(at::kDouble);
}

inline void expect_about(const at::Tensor& actual, const at::Tensor& expected, at::ScalarType type,
                         const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  const double most = type == at::kFloat ? 1e-5 : type == at::kHalf ? 3e-3 : 2e-2;
  const at::Tensor error = actual.cpu().to(at::kDouble) - expected.to(at::kDouble);
  EXPECT_LE(error.norm().item<double>(), most * expected.norm().item<double>()) << what;  // NaN is not
}

// Sequences of 75 kScale positions.
template <int64_t kScale>
struct AttentionCases {
  static constexpr int64_t kBatch = 2, kPositions = 75 * kScale, kKeys = 50 * kScale;
  static constexpr int64_t kHeads = 4, kDim = 8, kWidth = kHeads * kDim;
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();

  // starts of documents: of 1 position, of many, and of padding, which begins at itself.
  static at::Tensor document_starts() {
    const std::vector<std::vector<int64_t>> lengths = {{30 * kScale, 1, 20 * kScale, 9 * kScale},
                                                       {1, 2, 1, 1, 60 * kScale}};
    const at::Tensor starts = at::arange(kPositions, at::kLong).repeat({kBatch, 1});
    for (int64_t b = 0; b < kBatch; ++b) {
      int64_t begin = 0;
      for (const int64_t length : lengths[static_cast<size_t>(b)]) {
        starts[b].narrow(0, begin, length).fill_(begin);
        begin += length;
      }
    }
    return starts;
  }

  static PackedAttention causal() { return {kHeads, /*kv_heads=*/2, kDim, /*causal=*/true, {}, {}}; }

  static std::vector<std::pair<std::string, PackedAttention>> packed() {
    std::vector<std::pair<std::string, PackedAttention>> all = {{"causal", causal()}};
    const auto add = [&](const char* name, const auto& change) {
      all.emplace_back(name, causal());
      change(all.back().second);
    };
    add("window", [](PackedAttention& one) {
      one.window = 20 * kScale;
      one.scale = 0.5;
    });
    add("bidirectional", [](PackedAttention& one) { one.causal = false; });
    add("interleaved", [](PackedAttention& one) {
      one.kv_heads = kHeads;
      one.interleaved = true;
    });
    const auto slice = [](PackedAttention& one) {
      one.earlier = {{numbers({kBatch, 31 * kScale, one.packed()}, 5, at::kHalf), true, {}},
                     {numbers({kBatch, 20 * kScale, kWidth}, 6, at::kHalf), false, {}}};
      one.from_later = numbers({kBatch, kPositions, kWidth}, 7, at::kFloat);
    };
    add("slice", slice);
    add("slice with a window", [&](PackedAttention& one) {
      slice(one);
      one.window = 20 * kScale;
    });
    const auto documents = [](PackedAttention& one) {
      one.documents = std::make_shared<const DocumentPlaces>(document_starts());
    };
    add("documents", documents);
    add("documents with a window", [&](PackedAttention& one) {
      documents(one);
      one.window = 7 * kScale;
    });
    add("documents, interleaved", [&](PackedAttention& one) {
      documents(one);
      one.kv_heads = kHeads;
      one.interleaved = true;
    });
    for (size_t i = 0, count = all.size(); i < count; ++i) {
      all.emplace_back(all[i].first + ", padded", all[i].second);
      PackedAttention& padded = all.back().second;
      padded.shift = at::zeros({kBatch, padded.past() + kPositions});
      padded.shift[0].narrow(0, 0, 20 * kScale).fill_(-30000);  // the first queries may see nothing else
      padded.shift[1].narrow(0, 40 * kScale, 15 * kScale).fill_(-30000);
    }
    return all;
  }

  // What the kernels of a GPU compute, and by which; the operators compute the rest.
  enum class By { kOperators, kFlash, kEfficient };
  static By by(const PackedAttention& attention, at::ScalarType type) {
    if (type != at::kFloat && !attention.shift.defined())
      return attention.documents && !attention.earlier.empty() ? By::kOperators : By::kFlash;
    const bool no = attention.documents || (attention.window > 0 && !attention.earlier.empty());
    return no ? By::kOperators : By::kEfficient;
  }

  // out, log_sum_exp, dpacked, and the gradients of earlier keys; by the kernels, or by the operators.
  static std::vector<at::Tensor> run(PackedAttention attention, const at::Tensor& packed, const at::Tensor& dout,
                                     const at::TensorOptions& in, bool fused) {
    const auto sums = in.dtype(compute_type(in.dtype().toScalarType()));
    for (EarlierKeys& keys : attention.earlier) {
      keys.rows = keys.rows.to(in);
      keys.gradient = at::zeros({kBatch, keys.rows.size(1), 2 * attention.kv_heads * kDim}, sums);
    }
    if (attention.from_later.defined()) attention.from_later = attention.from_later.to(sums);
    if (attention.shift.defined()) attention.shift = attention.shift.to(sums);
    const at::Tensor rows = packed.to(in), dy = dout.to(in);
    std::vector<at::Tensor> results = {at::full_like(dy, NAN), at::full({kBatch, kHeads, kPositions}, NAN, sums),
                                       at::full_like(rows, NAN)};
    (fused ? fused_attention_forward : operators::attention_forward)(rows, attention, results[0], results[1]);
    (fused ? fused_attention_backward : operators::attention_backward)(rows, attention, results[0], results[1], dy,
                                                                       results[2]);
    for (const EarlierKeys& keys : attention.earlier) results.push_back(keys.gradient);
    return results;
  }

  // The same from the kernels and from the operators in float64, but for what no one reads.
  static void expect_same(const PackedAttention& attention, std::vector<at::Tensor> actual,
                          std::vector<at::Tensor> expected, at::ScalarType type) {
    const bool blind = attention.shift.defined() && attention.causal && attention.earlier.empty();
    for (std::vector<at::Tensor>* one : {&actual, &expected}) {
      if (blind) (*one)[0][0].narrow(0, 0, 20 * kScale).zero_();  // layers replace it by zeros
      if (!attention.documents) continue;
      const at::Tensor alone = attention.documents->rows_on((*one)[1].device()).alone;
      (*one)[1].masked_fill_(alone.unsqueeze(1), 0);  // backward needs no sums of these
    }
    for (size_t i = 0; i < expected.size(); ++i)
      expect_about(actual[i], expected[i], type, "result " + std::to_string(i));
  }

  // dL/dout for the case: zero where a query sees nothing but padding.
  static at::Tensor gradient_of(const PackedAttention& attention, at::ScalarType type) {
    const at::Tensor dout = numbers({kBatch, kPositions, kWidth}, 2, type);
    if (attention.shift.defined() && attention.causal && attention.earlier.empty())
      dout[0].narrow(0, 0, 20 * kScale).zero_();
    return dout;
  }

  struct ApartCase {
    std::string name;
    graph::ApartAttention attention;
    int64_t keys = kKeys;
  };

  static std::vector<ApartCase> apart(at::ScalarType type) {
    const auto random_mask = [](at::IntArrayRef sizes) { return numbers(sizes, 3, at::kFloat).gt(0.3); };
    at::Tensor of_queries = random_mask({kBatch, 1, kPositions, kKeys});
    of_queries[0][0].narrow(0, 7, 3).fill_(false);           // these queries see no key
    of_queries[1][0].slice(1, 0, 20 * kScale).fill_(false);  // with `causal`, neither do the first ones here
    const at::Tensor of_keys = at::ones({kBatch, 1, 1, kKeys}, at::kBool);
    of_keys[0].slice(2, 0, 6).fill_(false);
    of_keys[1].fill_(false);  // a sample without a key
    const double lowest = type == at::kHalf    ? -65504
                          : type == at::kFloat ? double{std::numeric_limits<float>::lowest()}
                                               : static_cast<double>(std::numeric_limits<at::BFloat16>::lowest());
    const auto added = [&](const at::Tensor& seen, double otherwise) {
      return numbers(seen.sizes(), 4, type).to(type).masked_fill_(seen.logical_not(), otherwise);
    };
    std::vector<ApartCase> all = {
        {"plain", {}, kPositions},
        {"causal", {true}, kPositions},
        {"unequal", {}},
        {"unequal, causal", {true}},
        {"more keys, causal", {true}, kPositions + 15},
        {"scaled", {false, {}, 0.7}},
        {"seen by each query", {false, of_queries}},
        {"seen by each head", {false, random_mask({1, kHeads, kPositions, kKeys})}},
        {"seen by all", {false, random_mask({kKeys})}},
        {"seen by some", {false, random_mask({kPositions, 1})}},
        {"keys", {false, of_keys}},
        {"added to each query", {false, added(of_queries, -kInfinity), 0.7}},
        {"added to all", {false, added(random_mask({kPositions, kKeys}), lowest)}},
        {"added to keys", {false, added(of_keys, -kInfinity)}},
    };
    for (size_t i = 6, count = all.size(); i < count; ++i) {
      all.push_back(all[i]);
      all.back().name += ", causal";
      all.back().attention.causal = true;
    }
    return all;
  }

  // out, dq, dk and dv of views of projections, as a captured model has them.
  static std::vector<at::Tensor> run_apart(const ApartCase& one, int64_t kv_heads, at::ScalarType type,
                                           const at::TensorOptions& in) {
    const auto heads = [&](int64_t positions, int64_t count, int seed) {
      return numbers({kBatch, positions, count, kDim}, seed, type).to(in).transpose(1, 2);
    };
    const at::Tensor q = heads(kPositions, kHeads, 1), dout = heads(kPositions, kHeads, 2);
    const at::Tensor k = heads(one.keys, kv_heads, 5), v = heads(one.keys, kv_heads, 6);
    graph::ApartAttention attention = one.attention;
    at::Tensor& mask = attention.mask;
    if (mask.defined()) mask = mask.scalar_type() == at::kBool ? mask.to(in.device()) : mask.to(in);
    const auto [out, sums] = graph::apart_attention(q, k, v, attention);
    const auto [dq, dk, dv] = graph::apart_attention_backward(dout, q, k, v, out, sums, attention);
    return {out, dq, dk, dv};
  }

  static void expect_same_apart(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected,
                                at::ScalarType type) {
    for (size_t i = 0; i < expected.size(); ++i)
      expect_about(actual[i], expected[i], type, "result " + std::to_string(i));
    // Queries that see no key have zeros, and so have keys that no query sees.
    const at::Tensor queries = expected[0].ne(0), keys = expected[3].ne(0);
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(actual[i].cpu().eq(0).logical_or(i < 2 ? queries : keys).all().item<bool>()) << i;
  }
};

}  // namespace twobp::test
