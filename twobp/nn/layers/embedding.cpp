#include "twobp/nn/layers/embedding.h"

#include "twobp/core/check.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/kernels/rows/operators.h"
#include "twobp/nn/layers/attention_inputs.h"

namespace twobp {
namespace {

void check_ids(const at::Tensor& ids, int64_t vocab) {
  const at::Tensor in_order = ids.contiguous();
  const int64_t* id = in_order.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < ids.numel(); ++i) {
    TWOBP_CHECK(id[i] >= 0 && id[i] < vocab, "token id ", id[i], " at position ", i,
                " of the micro-batch is outside the vocabulary of ", vocab);
  }
}

}  // namespace

Embedding::Embedding(std::string name, int64_t vocab, int64_t dim, double init_std, at::ScalarType dtype,
                     int64_t padding, double scale)
    : weight_({{std::move(name), vocab}}, {vocab, dim}, dtype, init_std), padding_(padding), scale_(scale) {
  weight_.used_as(/*factor=*/false, /*table=*/true);
}

Values Embedding::forward(Values, Context& context, Saved& saved) {
  const at::Tensor& ids = context.field("input_ids");
  TWOBP_CHECK(ids.scalar_type() == at::kLong && ids.dim() == 2, "input_ids must be int64 (batch, sequence), got ",
              c10::toString(ids.scalar_type()), " ", ids.sizes());
  if (ids.is_cpu()) check_ids(ids, weight_.value.size(0));
  const at::Tensor at = on_device(ids, weight_.value.device());
  if (context.keeps() && weight_.trainable()) saved.keep_until_p2(at);
  at::Tensor rows = at::embedding(weight_.value, at);
  if (scale_ != 1) rows.mul_(scale_);
  return {std::move(rows)};
}

Values Embedding::backward_p1(Values dy, Context&, Saved& saved) {
  if (!weight_.trainable()) return {};
  TWOBP_CHECK(saved.p2_count() == 1, "backward-p1 of Embedding ", weight_.name(),
              " does not find exactly one saved tensor, the ids: it runs once after each forward");
  const at::Tensor& ids = saved.p2(0);
  TWOBP_CHECK(dy[0].numel() == ids.numel() * weight_.value.size(1), "the gradient ", dy[0].sizes(), " of Embedding ",
              weight_.name(), " does not fit its output for ids ", ids.sizes());
  saved.keep_until_p2(std::move(dy[0]));
  return {};
}

void Embedding::backward_p2(std::span<Saved* const> saved) {
  const int64_t dim = weight_.sizes()[1];
  for (const Saved* one : saved) {
    const at::Tensor ids = one->p2(0).contiguous();
    const at::Tensor dy = one->p2(1).contiguous();
    if (by_operators(weight_.value) || weight_.shares_grad()) {
      at::Tensor rows = dy.view({-1, dim});
      if (weight_.shares_grad()) rows = operators::wide(rows);
      if (padding_ >= 0) rows = rows.masked_fill(ids.view({-1, 1}).eq(padding_), 0);
      weight_.accumulate_rows(ids.view({-1}), scale_ == 1 ? rows : rows * scale_);
      continue;
    }
    at::Tensor& grad = weight_.grad_to_add();
    const int64_t* id = ids.const_data_ptr<int64_t>();
    dispatch_float(dy.scalar_type(), "Embedding", [&](auto zero) {
      using S = decltype(zero);
      auto* rows = mutable_numbers<Compute<S>>(grad);
      const auto scale = static_cast<Compute<S>>(scale_);
      const S* from = numbers<S>(dy);
      for (int64_t i = 0; i < ids.numel(); ++i, from += dim) {
        if (id[i] == padding_) continue;
        auto* row = rows + id[i] * dim;
        for (int64_t c = 0; c < dim; ++c) row[c] += scale * load(from[c]);
      }
    });
  }
}

void Embedding::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  if (weight_.trainable()) units.push_back({this, &saved});
}
void Embedding::collect_parameters(std::vector<Parameter*>& parameters) {
  parameters.push_back(&weight_);
}

namespace {

// The positions within their documents, (B S) int64. Undefined if samples are not packed.
at::Tensor within_documents(const Context& context, const at::Tensor& x) {
  const auto documents = documents_of(context, x.size(0), x.size(1));
  if (!documents) return {};
  const at::Tensor& starts = documents->starts();
  return on_device((at::arange(context.past, context.past + x.size(1), starts.options()) - starts).flatten(),
                   x.device());
}

}  // namespace

LearnedPositions::LearnedPositions(std::string name, int64_t positions, int64_t dim, double init_std,
                                   at::ScalarType dtype)
    : weight_({{std::move(name), positions}}, {positions, dim}, dtype, init_std) {
  weight_.used_as(/*factor=*/false, /*table=*/true);
}

Values LearnedPositions::forward(Values values, Context& context, Saved& saved) {
  at::Tensor x = std::move(values[0]);
  TWOBP_CHECK(x.dim() == 3 && x.size(2) == weight_.sizes()[1], "the positions ", weight_.name(),
              " take (batch, sequence, ", weight_.sizes()[1], "), got ", x.sizes());
  const int64_t past = context.past;
  TWOBP_CHECK(past + x.size(1) <= weight_.sizes()[0], "a sequence of ", past + x.size(1), " tokens is longer than the ",
              weight_.sizes()[0], " positions of ", weight_.name());
  at::Tensor rows = weight_.value.narrow(0, past, x.size(1));
  if (context.keeps()) saved.keep_until_p1(rows);  // a view of the weight: it says that forward ran
  if (const at::Tensor own = within_documents(context, x); own.defined()) {
    rows = weight_.value.index_select(0, own).view(x.sizes());
  }
  if (exclusively_owned(x)) {
    x.add_(rows);
    return {std::move(x)};
  }
  return {x + rows};
}

Values LearnedPositions::backward_p1(Values dy, Context& context, Saved& saved) {
  const int64_t positions = saved.take_p1(0).size(0);
  TWOBP_CHECK(dy[0].dim() == 3 && dy[0].size(1) == positions, "the gradient ", dy[0].sizes(),
              " does not fit the output of ", weight_.name(), ", of ", positions, " positions");
  if (weight_.trainable()) {
    const at::Tensor& gradient = dy[0];
    const at::ScalarType type = compute_type(gradient.scalar_type());
    if (const at::Tensor own = within_documents(context, gradient); own.defined()) {
      weight_.grad_to_add().index_add_(0, own, gradient.flatten(0, 1).to(type));
    } else {
      weight_.grad_to_add().narrow(0, context.past, gradient.size(1)).add_(gradient.sum(0, /*keepdim=*/false, type));
    }
  }
  return dy;
}

void LearnedPositions::collect_parameters(std::vector<Parameter*>& parameters) {
  parameters.push_back(&weight_);
}

namespace {

void check_ids(const at::Tensor& ids, int64_t count, const char* field, const char* of) {
  TWOBP_CHECK(ids.scalar_type() == at::kLong && ids.dim() == 2, field, " must be int64 (batch, sequence), got ",
              c10::toString(ids.scalar_type()), " ", ids.sizes());
  const at::Tensor in_order = ids.contiguous();
  const int64_t* id = in_order.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < ids.numel(); ++i) {
    TWOBP_CHECK(id[i] >= 0 && id[i] < count, field, " has ", id[i], " at position ", i,
                " of the micro-batch, outside the ", of, " of ", count);
  }
}

template <typename T, typename S>
void add_row(T* __restrict to, const S* __restrict from, int64_t cols) {
  for (int64_t c = 0; c < cols; ++c) to[c] += load(from[c]);
}

}  // namespace

BertEmbedding::BertEmbedding(const std::string& prefix, const BertEmbeddingShape& shape, double eps, double dropout,
                             double init_std, at::ScalarType dtype)
    : words_({{prefix + ".word_embeddings.weight", shape.vocab}}, {shape.vocab, shape.dim}, dtype, init_std),
      positions_({{prefix + ".position_embeddings.weight", shape.positions}}, {shape.positions, shape.dim}, dtype,
                 init_std),
      types_({{prefix + ".token_type_embeddings.weight", shape.types}}, {shape.types, shape.dim}, dtype, init_std),
      padding_(shape.padding),
      norm_(prefix + ".LayerNorm", shape.dim, eps, dtype),
      rate_(dropout, prefix + ".dropout") {
  for (Parameter* table : {&words_, &positions_, &types_}) table->used_as(/*factor=*/false, /*table=*/true);
}

LayerNormRows::Rows BertEmbedding::gather(const at::Tensor& ids, const at::Tensor& types, at::Tensor& sum) const {
  const int64_t sequence = ids.size(1);
  const int64_t cols = norm_.dim();
  if (by_operators(sum)) {
    return [=, this](int64_t, int64_t) mutable {
      const auto rows = [&](const Parameter& of, const at::Tensor& at) {
        return at::embedding(of.value, at).to(compute_type(sum.scalar_type()));
      };
      const at::Tensor kinds = rows(types_, types.defined() ? types : at::zeros_like(ids));
      sum.copy_(rows(words_, ids).add_(kinds).add_(positions_.value.narrow(0, 0, sequence)));
    };
  }
  LayerNormRows::Rows gather;
  dispatch_float(sum.scalar_type(), "BertEmbedding", [&](auto zero) {
    using S = decltype(zero);
    const int64_t* id = ids.const_data_ptr<int64_t>();
    const int64_t* type = types.defined() ? types.const_data_ptr<int64_t>() : nullptr;
    const S* words = numbers<S>(words_.value);
    const S* positions = numbers<S>(positions_.value);
    const S* kinds = numbers<S>(types_.value);
    S* to = mutable_numbers<S>(sum);
    gather = [=](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const S* word = words + id[r] * cols;
        const S* position = positions + r % sequence * cols;
        const S* kind = kinds + (type == nullptr ? 0 : type[r]) * cols;
        S* row = to + r * cols;
        for (int64_t c = 0; c < cols; ++c) {
          store(row[c], load(word[c]) + load(kind[c]) + load(position[c]));
        }
      }
    };
  });
  return gather;
}

Values BertEmbedding::forward(Values, Context& context, Saved& saved) {
  at::Tensor ids = context.field("input_ids").contiguous();
  check_ids(ids, words_.sizes()[0], "input_ids", "vocabulary");
  const auto typed = context.fields->find("token_type_ids");
  at::Tensor types;  // undefined: all 0
  if (typed != context.fields->end()) {
    types = typed->second.contiguous();
    check_ids(types, types_.sizes()[0], "token_type_ids", "types");
    TWOBP_CHECK(types.sizes() == ids.sizes(), "token_type_ids ", types.sizes(), " do not fit input_ids ", ids.sizes());
    types = on_device(types, words_.value.device());
  }
  ids = on_device(ids, words_.value.device());
  const int64_t sequence = ids.size(1);
  const int64_t cols = norm_.dim();
  TWOBP_CHECK(sequence <= positions_.sizes()[0], "a sequence of ", sequence, " is longer than the ",
              positions_.sizes()[0], " positions of the model");
  at::Tensor sum = at::empty({ids.size(0), sequence, cols}, words_.value.options());
  at::Tensor y = at::empty_like(sum);
  const DropoutMask mask = rate_.mask(context);
  LayerNormRows::Rows drop;
  if (rate_.active(context)) {
    drop = [&](int64_t begin, int64_t end) { dropout_rows(y, {}, y, cols, mask, begin, end); };
  }
  at::Tensor statistics = norm_.forward(sum, y, gather(ids, types, sum), drop);
  if (context.keeps()) {
    saved.keep_until_p1(std::move(sum));
    saved.keep_until_p1(std::move(statistics));
    if (has_p2()) saved.keep_until_p2(types.defined() ? at::stack({ids, types}) : ids.unsqueeze(0));
  }
  return {std::move(y)};
}

Values BertEmbedding::backward_p1(Values values, Context& context, Saved& saved) {
  at::Tensor sum = saved.take_p1(0);
  at::Tensor statistics = saved.take_p1(1);
  at::Tensor dy = as_contiguous(std::move(values[0]));
  TWOBP_CHECK(dy.sizes() == sum.sizes(), "the gradient ", dy.sizes(), " does not fit the output of BertEmbedding ",
              words_.name(), ", ", sum.sizes());
  const bool drops = rate_.active(context);
  const DropoutMask mask = rate_.mask(context);
  at::Tensor gradient = exclusively_owned(dy) ? dy : at::empty_like(dy);
  LayerNormRows::Rows drop_again;
  if (drops) {
    drop_again = [&](int64_t begin, int64_t end) { dropout_rows(dy, {}, gradient, norm_.dim(), mask, begin, end); };
  }
  norm_.backward(drops ? gradient : dy, sum, statistics, gradient, drop_again);
  if (has_p2()) saved.keep_until_p2(std::move(gradient));
  return {};
}

void BertEmbedding::backward_p2(std::span<Saved* const> saved) {
  const int64_t cols = norm_.dim();
  for (const Saved* one : saved) {
    const at::Tensor& ids = one->p2(0);  // ids (1, B, S), or ids and types (2, B, S)
    const at::Tensor& gradient = one->p2(1);
    const int64_t sequence = ids.size(2);
    const int64_t tokens = ids.size(1) * sequence;
    if (by_operators(gradient)) {
      const at::Tensor rows = gradient.view({tokens, cols});
      const auto add = [&](Parameter& to, const at::Tensor& at, const at::Tensor& from) {
        if (to.trainable()) operators::add_rows_at(to.grad_to_add(), at.reshape({-1}), from);
      };
      const at::Tensor pads = ids[0].reshape({-1, 1}).eq(padding_);
      add(words_, ids[0], padding_ < 0 ? rows : rows.masked_fill(pads, 0));
      add(positions_, at::arange(sequence, ids.options()).expand({ids.size(1), sequence}), rows);
      add(types_, ids.size(0) == 2 ? ids[1] : at::zeros_like(ids[0]), rows);
      continue;
    }
    const int64_t* id = ids.const_data_ptr<int64_t>();
    const int64_t* type = ids.size(0) == 2 ? id + tokens : nullptr;
    dispatch_float(gradient.scalar_type(), "BertEmbedding", [&](auto zero) {
      using S = decltype(zero);
      using T = Compute<S>;
      const auto rows_of = [](Parameter& parameter) {
        return parameter.trainable() ? mutable_numbers<T>(parameter.grad_to_add()) : nullptr;
      };
      T* words = rows_of(words_);
      T* positions = rows_of(positions_);
      T* kinds = rows_of(types_);
      const S* from = numbers<S>(gradient);
      for (int64_t r = 0; r < tokens; ++r, from += cols) {
        if (words != nullptr && id[r] != padding_) add_row(words + id[r] * cols, from, cols);
        if (positions != nullptr) add_row(positions + r % sequence * cols, from, cols);
        if (kinds != nullptr) add_row(kinds + (type == nullptr ? 0 : type[r]) * cols, from, cols);
      }
    });
  }
}

void BertEmbedding::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  if (has_p2()) units.push_back({this, &saved});
}

void BertEmbedding::collect_parameters(std::vector<Parameter*>& parameters) {
  parameters.insert(parameters.end(), {&words_, &positions_, &types_});
  norm_.collect_parameters(parameters);
}

}  // namespace twobp
