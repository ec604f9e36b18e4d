// Attention as a GPU computes it, by stand-ins for ATen's fused kernels on a CPU (fused_kernels_on_cpus.h), against the
// operators and against plain products in float64.
#include <cmath>
#include <limits>
#include <thread>

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include "tests/nn/device/attention_cases.h"
#include "tests/nn/device/fused_kernels_on_cpus.h"
#include "twobp/core/text.h"
#include "twobp/graph/apart_attention.h"
#include "twobp/nn/kernels/attention/fused_heads.h"
#include "twobp/nn/kernels/attention/packed_attention.h"
#include "twobp/nn/kernels/rows/operators.h"
#include "twobp/nn/layers/attention.h"
#include "twobp/nn/layers/attention_inputs.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_about;
using test::FusedCall;
using test::last_fused_call;
using test::numbers;
using Kernel = FusedCall::Kernel;
using Cases = test::AttentionCases<1>;
using By = Cases::By;

constexpr int64_t kBatch = Cases::kBatch, kPositions = Cases::kPositions;
constexpr int64_t kHeads = Cases::kHeads, kDim = Cases::kDim, kWidth = Cases::kWidth;

// Sharing out such small operators takes far longer than running them.
class OnOneThread : public ::testing::Environment {
  void SetUp() override { at::set_num_threads(1); }
};
const ::testing::Environment* const on_one_thread = ::testing::AddGlobalTestEnvironment(new OnOneThread);

TEST(FusedAttention, AttendsAsTheOperatorsDo) {
  const FusedKernelsOnCpus kernels;
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const auto& [name, attention] : Cases::packed()) {
      SCOPED_TRACE(concat(c10::toString(type), ", ", name));
      const at::Tensor packed = numbers({kBatch, kPositions, attention.packed()}, 1, type);
      const at::Tensor dout = Cases::gradient_of(attention, type);
      const By by = Cases::by(attention, type);
      ASSERT_EQ(takes_fused_attention(packed.to(type), attention), by != By::kOperators);
      EXPECT_EQ(attention_type(packed.to(type), attention), by != By::kOperators ? type : at::kFloat);
      if (by == By::kOperators) continue;
      const auto actual = Cases::run(attention, packed, dout, type, /*fused=*/true);
      EXPECT_EQ(last_fused_call().kernel, by == By::kFlash ? Kernel::kFlashBackward : Kernel::kEfficientBackward);
      Cases::expect_same(attention, actual, Cases::run(attention, packed, dout, at::kDouble, /*fused=*/false), type);
    }
  }
}

TEST(FusedAttention, LeavesTheRestToTheOperators) {
  const FusedKernelsOnCpus kernels;
  const auto takes = [](const PackedAttention& attention, at::ScalarType type) {
    return takes_fused_attention(at::empty({1, 3, attention.packed()}, type), attention);
  };
  PackedAttention attention = Cases::causal();
  EXPECT_TRUE(takes(attention, at::kHalf));
  EXPECT_FALSE(takes(attention, at::kDouble));
  attention.head_dim = 12;
  EXPECT_FALSE(takes(attention, at::kHalf));
  attention.head_dim = 264;
  EXPECT_FALSE(takes(attention, at::kHalf));
  attention = Cases::causal();
  attention.cap = 1;
  EXPECT_FALSE(takes(attention, at::kHalf));
  attention = Cases::causal();
  attention.dropout.threshold = 1;
  EXPECT_TRUE(takes(attention, at::kHalf));
  attention.dropout.length = 3;  // the first of several slices
  EXPECT_FALSE(takes(attention, at::kHalf));
  attention.dropout.length = 0;
  attention.earlier = {{at::empty({1, 3, 2 * kWidth}), false, {}}};
  EXPECT_FALSE(takes(attention, at::kHalf));
  attention.dropout.threshold = 0;
  EXPECT_TRUE(takes(attention, at::kHalf));
  // 2^31 scores in all, which the memory-efficient kernels count differently forward and backward.
  FusedHeads form;
  form.dropout.threshold = 1;
  EXPECT_TRUE(fused_kernels_compute(at::kFloat, 8, 4096, 15, 4096, form));
  EXPECT_FALSE(fused_kernels_compute(at::kFloat, 8, 4096, 16, 4096, form));
  EXPECT_TRUE(fused_kernels_compute(at::kHalf, 8, 4096, 16, 4096, form));
}

// q, k and v as (B, heads, S, D), of float64.
struct Plain {
  at::Tensor out, dq, dk, dv;
};

// Dropout's `factors` are of the scores (B, H, S, L), to which `bias` is added.
Plain plain_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& dout,
                      const at::Tensor& bias, const at::Tensor& factors, double scale) {
  const int64_t group = q.size(1) / k.size(1);
  const auto repeated = [&](const at::Tensor& x) { return x.repeat_interleave(group, 1); };
  const auto of_group = [&](const at::Tensor& x) { return x.unflatten(1, {k.size(1), group}).sum(2); };
  const at::Tensor p = (at::matmul(q, repeated(k).transpose(2, 3)) * scale + bias).softmax(3);
  const at::Tensor dp = at::matmul(dout, repeated(v).transpose(2, 3)) * factors;
  const at::Tensor ds = p * (dp - (p * dp).sum(3, true)) * scale;
  return {at::matmul(p * factors, repeated(v)), at::matmul(ds, repeated(k)),
          of_group(at::matmul(ds.transpose(2, 3), q)), of_group(at::matmul((p * factors).transpose(2, 3), dout))};
}

DropoutMask mask_of(uint32_t key, uint32_t micro_batch) {
  return {{key, 9}, micro_batch, /*threshold=*/20000, 65536. / (65536 - 20000), 0, 0, 0};
}

at::Tensor hidden_keys(const PackedAttention& attention) {
  at::Tensor hidden = at::zeros({1, 1, kPositions, kPositions}, at::kBool);
  if (attention.causal) hidden = at::ones({kPositions, kPositions}, at::kBool).triu(1).expand({1, 1, -1, -1});
  if (attention.window > 0) hidden = hidden | at::ones_like(hidden).tril(-attention.window);
  if (attention.documents)
    hidden = hidden | at::arange(kPositions).lt(attention.documents->starts().unsqueeze(2)).unsqueeze(1);
  return hidden;
}

// The factors of a call, (B, H, S, S). In documents, each has its own.
at::Tensor factors_of(const FusedCall& call, bool flash) {
  if (!call.bounds.defined())
    return test::fused_dropout(flash, call.seed, call.dropout, {kBatch, kHeads, kPositions, kPositions});
  const at::Tensor factors = at::zeros({kBatch, kHeads, kPositions, kPositions}, at::kDouble);
  for (int64_t d = 0; d + 1 < call.bounds.numel(); ++d) {
    const int64_t begin = call.bounds[d].item<int>(), count = call.bounds[d + 1].item<int>() - begin;
    const int64_t b = begin / kPositions, at = begin % kPositions;
    factors[b]
        .narrow(1, at, count)
        .narrow(2, at, count)
        .copy_(test::fused_dropout(flash, call.seed, call.dropout, {1, kHeads, count, count}, d)[0]);
  }
  return factors;
}

TEST(FusedAttention, DropsByItsKeyAlone) {
  const FusedKernelsOnCpus kernels;
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  generator.set_current_seed(5);
  generator.get<at::CPUGeneratorImpl>()->random64();
  const at::Tensor before = generator.get_state();
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (auto [name, attention] : Cases::packed()) {
      if (Cases::by(attention, type) == By::kOperators || !attention.earlier.empty()) continue;
      SCOPED_TRACE(concat(c10::toString(type), ", ", name));
      const bool flash = Cases::by(attention, type) == By::kFlash;
      const at::Tensor packed = numbers({kBatch, kPositions, attention.packed()}, 1, type);
      const at::Tensor dout = numbers({kBatch, kPositions, kWidth}, 2, type);
      if (attention.shift.defined()) {
        attention.shift.zero_();  // no query sees padding alone
        attention.shift[1].narrow(0, 40, 10).fill_(-30000);
      }
      const auto run = [&](const DropoutMask& mask) {
        PackedAttention here = attention;
        here.dropout = mask;
        return Cases::run(here, packed, dout, type, /*fused=*/true);
      };
      const auto actual = run(mask_of(1, 2));
      const FusedCall call = last_fused_call();
      EXPECT_EQ(call.dropout, 20000 / 65536.);
      const PackedHeads heads(packed, attention);
      at::Tensor bias = at::zeros({kBatch, 1, kPositions, kPositions}, at::kDouble);
      if (attention.shift.defined()) bias = bias + attention.shift.to(at::kDouble).view({kBatch, 1, 1, -1});
      bias = bias.masked_fill(hidden_keys(attention), -Cases::kInfinity);
      at::Tensor factors = factors_of(call, flash);
      if (attention.documents) {
        // A document of one position that lies among others like it keeps its value.
        const at::Tensor& alone = attention.documents->rows_on(at::kCPU).alone;
        factors.masked_fill_(alone.view({kBatch, 1, -1, 1}), 1);
      }
      const auto by_head = [&](const at::Tensor& x) { return x.unflatten(2, {kHeads, kDim}).transpose(1, 2); };
      const double scale = attention.scale > 0 ? attention.scale : 1 / std::sqrt(double{kDim});
      const Plain plain = plain_attention(heads.q.transpose(1, 2), heads.k.transpose(1, 2), heads.v.transpose(1, 2),
                                          by_head(dout), bias, factors, scale);
      expect_about(by_head(actual[0]), plain.out, type, "out");
      const PackedHeads gradients(actual[2], attention);
      expect_about(gradients.q.transpose(1, 2), plain.dq, type, "dq");
      expect_about(gradients.k.transpose(1, 2), plain.dk, type, "dk");
      expect_about(gradients.v.transpose(1, 2), plain.dv, type, "dv");
      EXPECT_TRUE(run(mask_of(1, 2))[2].equal(actual[2])) << "the same key";
      EXPECT_FALSE(run(mask_of(2, 2))[2].equal(actual[2])) << "another key";
      EXPECT_FALSE(run(mask_of(1, 3))[2].equal(actual[2])) << "another micro-batch";
    }
  }
  EXPECT_TRUE(generator.get_state().equal(before)) << "others draw from the generator too";
}

// Ranks are threads that may share a GPU, and thus its generator. Both kernels draw from it.
TEST(FusedAttention, RanksDrawInTurn) {
  const FusedKernelsOnCpus kernels;
  const at::Tensor packed = numbers({kBatch, kPositions, Cases::causal().packed()}, 1, at::kHalf);
  const at::Tensor dout = numbers({kBatch, kPositions, kWidth}, 2, at::kHalf);
  const auto run = [&](uint32_t key) {
    PackedAttention attention = Cases::causal();
    attention.dropout = mask_of(key, 0);
    return Cases::run(attention, packed, dout, key % 2 == 0 ? at::kHalf : at::kFloat, /*fused=*/true)[2];
  };
  constexpr uint32_t kRanks = 3, kCalls = 4;
  std::vector<std::vector<at::Tensor>> results(kRanks);
  std::vector<std::thread> ranks;
  std::vector<std::string> errors(kRanks);
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      at::set_num_threads(1);
      try {
        for (uint32_t i = 0; i < kCalls; ++i) results[rank].push_back(run(rank * kCalls + i));
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    ASSERT_EQ(errors[rank], "");
    for (uint32_t i = 0; i < kCalls; ++i) EXPECT_TRUE(results[rank][i].equal(run(rank * kCalls + i)));
  }
}

TEST(DocumentPlaces, AreRowsOfDocuments) {
  const DocumentPlaces places(Cases::document_starts());
  const DocumentRows& rows = places.rows_on(at::kCPU);
  EXPECT_EQ(&places.rows_on(at::kCPU), &rows) << "made once";
  // The 15 positions of padding are one document. So are two documents of one position that are neighbours.
  const std::vector<int> bounds = {0, 30, 31, 51, 60, 75, 76, 78, 80, 140, 150};
  EXPECT_TRUE(rows.bounds.equal(at::tensor(bounds, at::kInt))) << rows.bounds;
  EXPECT_EQ(rows.longest, 60);
  EXPECT_EQ(rows.count(), 10);
  at::Tensor alone = at::zeros({kBatch, kPositions}, at::kBool);
  alone[0].slice(0, 60).fill_(true);
  alone[1].slice(0, 3, 5).fill_(true);
  alone[1].slice(0, 65).fill_(true);
  EXPECT_TRUE(rows.alone.equal(alone)) << rows.alone;
  const DocumentPlaces one(at::zeros({3, 5}, at::kLong));
  EXPECT_TRUE(one.rows_on(at::kCPU).bounds.equal(at::tensor({0, 5, 10, 15}, at::kInt)));
  EXPECT_FALSE(one.rows_on(at::kCPU).alone.defined());
  const DocumentPlaces padding(at::arange(300, at::kLong).unsqueeze(0));
  EXPECT_EQ(padding.rows_on(at::kCPU).longest, 128) << "time in proportion to the square";
  EXPECT_TRUE(padding.rows_on(at::kCPU).bounds.equal(at::tensor({0, 128, 256, 300}, at::kInt)));
}

// Layers of a rank read the same documents: they are checked and copied once for a micro-batch.
TEST(FusedAttention, LayersShareTheDocuments) {
  const FusedKernelsOnCpus kernels;
  const Fields fields = {{kDocumentStarts, Cases::document_starts()}};
  AttentionShape shape;
  shape.heads = kHeads;
  shape.kv_heads = 2;
  shape.head_dim = kDim;
  std::shared_ptr<const DocumentPlaces> documents;
  Context context;
  context.fields = &fields;
  const at::Tensor x = numbers({kBatch, kPositions, shape.packed()}, 1, at::kHalf).to(at::kHalf);
  const at::Tensor dout = numbers({kBatch, kPositions, kWidth}, 2, at::kHalf).to(at::kHalf);
  std::vector<at::Tensor> bounds, gradients;
  for (const bool share : {true, true, false}) {
    context.documents = share ? &documents : nullptr;
    Attention layer(shape, at::kHalf);
    Saved saved;
    layer.forward({x.clone()}, context, saved);
    bounds.push_back(last_fused_call().bounds);
    gradients.push_back(layer.backward_p1({dout.clone()}, context, saved)[0]);
    bounds.push_back(last_fused_call().bounds);
  }
  for (const size_t i : {1, 2, 3}) EXPECT_TRUE(bounds[i].is_same(bounds[0])) << i;
  EXPECT_FALSE(bounds[4].is_same(bounds[0]));
  EXPECT_TRUE(gradients[2].equal(gradients[0]));
  Attention by_operators(AttentionShape{shape}, at::kDouble);
  Saved saved;
  by_operators.forward({x.to(at::kDouble)}, context, saved);
  expect_about(gradients[0], by_operators.backward_p1({dout.to(at::kDouble)}, context, saved)[0], at::kHalf, "dx");
}

// A slice's first call has no earlier keys, but the others have: all kinds of a slice go together.
TEST(FusedAttention, SlicesOfDocumentsAndDropoutAgree) {
  const FusedKernelsOnCpus kernels;
  const Fields fields = {{kDocumentStarts, Cases::document_starts()}};
  AttentionShape shape;
  shape.heads = kHeads;
  shape.kv_heads = 2;
  shape.head_dim = kDim;
  const at::Tensor x = numbers({kBatch, kPositions, shape.packed()}, 1, at::kHalf);
  const at::Tensor dout = numbers({kBatch, kPositions, kWidth}, 2, at::kHalf);
  for (const double dropout : {0., 0.3}) {
    const auto run = [&](at::ScalarType type) {
      Attention layer(shape, type, dropout);
      std::vector<Context> contexts;
      std::vector<Fields> parts;
      std::vector<Saved> saved(2);
      saved[1].follow(&saved[0]);
      const std::vector<int64_t> cuts = {0, 40, kPositions};
      for (const size_t s : {0, 1}) parts.push_back(slice_of(fields, cuts[s], cuts[s + 1] - cuts[s]));
      std::vector<at::Tensor> out(2), dx(2);
      for (const size_t s : {0, 1}) {
        Context& context = contexts.emplace_back();
        context.fields = &parts[s];
        context.slice = {&fields, kPositions, cuts[s + 1] - cuts[s]};
        context.past = cuts[s];
        out[s] = layer.forward({x.narrow(1, cuts[s], cuts[s + 1] - cuts[s]).to(type)}, context, saved[s])[0];
      }
      for (const size_t s : {1, 0}) {
        const at::Tensor dy = dout.narrow(1, cuts[s], cuts[s + 1] - cuts[s]).to(type);
        dx[s] = layer.backward_p1({dy}, contexts[s], saved[s])[0];
      }
      return std::pair(at::cat(out, 1), at::cat(dx, 1));
    };
    const auto [out, dx] = run(at::kHalf);
    const auto [expected_out, expected_dx] = run(at::kDouble);
    expect_about(out, expected_out, at::kHalf, concat("out, dropout ", dropout));
    expect_about(dx, expected_dx, at::kHalf, concat("dx, dropout ", dropout));
  }
}

TEST(FusedAttention, AttendsApart) {
  const FusedKernelsOnCpus kernels;
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const Cases::ApartCase& one : Cases::apart(type)) {
      for (const int64_t kv_heads : {kHeads, int64_t{2}}) {
        SCOPED_TRACE(concat(c10::toString(type), ", ", one.name, ", ", kv_heads, " key-value heads"));
        const auto actual = Cases::run_apart(one, kv_heads, type, type);
        const bool flash =
            type != at::kFloat && !one.attention.mask.defined() && (!one.attention.causal || one.keys == kPositions);
        EXPECT_EQ(last_fused_call().kernel, flash ? Kernel::kFlashBackward : Kernel::kEfficientBackward);
        EXPECT_EQ(actual[0].scalar_type(), type);
        EXPECT_TRUE(actual[0].transpose(1, 2).is_contiguous()) << "as ATen's kernel for CPUs";
        Cases::expect_same_apart(actual, Cases::run_apart(one, kv_heads, type, at::kDouble), type);
      }
    }
  }
}

TEST(FusedAttention, AttendsApartWithAnyStrides) {
  const FusedKernelsOnCpus kernels;
  const auto run = [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& dout,
                      const at::Tensor& mask) {
    const graph::ApartAttention attention{false, mask};
    const auto [out, sums] = graph::apart_attention(q, k, v, attention);
    EXPECT_EQ(last_fused_call().kernel, mask.defined() ? Kernel::kEfficient : Kernel::kFlash);
    const auto [dq, dk, dv] = graph::apart_attention_backward(dout, q, k, v, out, sums, attention);
    const std::vector all{out, dq, dk, dv};
    for (const at::Tensor& one : all) EXPECT_TRUE(one.transpose(1, 2).is_contiguous()) << "as ATen's on a CPU";
    return all;
  };
  const auto some = [](int seed) { return numbers({kBatch, kHeads, 9, kDim}, seed, at::kHalf).to(at::kHalf); };
  // The last dimension is no row, the rows begin at odd places, or all heads are one.
  const at::Tensor columns = some(1).transpose(2, 3).contiguous().transpose(2, 3);
  const at::Tensor odd = at::zeros({kBatch, kHeads, 9, kDim + 3}, at::kHalf).narrow(3, 1, kDim).copy_(some(2));
  const at::Tensor one_head = some(3).narrow(1, 0, 1).expand({-1, kHeads, -1, -1});
  const at::Tensor dout = some(4).transpose(2, 3).contiguous().transpose(2, 3);
  at::Tensor mask = at::ones({9, 9}, at::kBool);
  mask[2][3] = false;
  for (const at::Tensor& one : {at::Tensor(), mask}) {
    const auto actual = run(columns, odd, one_head, dout, one);
    const auto expected = run(columns.contiguous(), odd.contiguous(), one_head.contiguous(), dout.contiguous(), one);
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(actual[i].equal(expected[i])) << i;
  }
}

// float64, a mask that the type cannot hold, and scales that are no factors of a softmax.
TEST(FusedAttention, LeavesTheRestOfApartToTheOperators) {
  const FusedKernelsOnCpus kernels;
  const auto kernel = [](at::ScalarType type, int64_t dim, const graph::ApartAttention& attention) {
    const at::Tensor x = at::ones({1, 2, 3, dim}, type);
    graph::apart_attention(x, x, x, attention);
    return last_fused_call().kernel;
  };
  EXPECT_EQ(kernel(at::kHalf, 8, {}), Kernel::kFlash);
  EXPECT_EQ(kernel(at::kFloat, 8, {false, at::zeros({3, 3})}), Kernel::kEfficient);
  EXPECT_EQ(kernel(at::kDouble, 8, {}), Kernel::kNone);
  EXPECT_EQ(kernel(at::kHalf, 12, {}), Kernel::kNone);
  EXPECT_EQ(kernel(at::kHalf, 8, {false, at::zeros({3, 3})}), Kernel::kNone);
  EXPECT_EQ(kernel(at::kHalf, 8, {false, {}, -1.}), Kernel::kNone);
  EXPECT_EQ(kernel(at::kHalf, 8, {false, {}, 0.}), Kernel::kNone);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
