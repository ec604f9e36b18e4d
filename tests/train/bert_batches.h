// Batches for BERT.
#pragma once

#include <string>
#include <vector>

#include "tests/train/training.h"

namespace twobp::test {

// Batches with padding and token types. Only a few labels count. `without` is a field that they lack.
inline std::vector<Batch> bert_batches(int steps, int micro_batches, const std::string& without = "") {
  std::vector<Batch> batches = random_batches(steps, micro_batches);
  int64_t length = 3;
  for (Batch& batch : batches) {
    for (Fields& fields : batch.micro_batches) {
      const at::Tensor& ids = fields.at("input_ids");
      at::Tensor mask = at::ones_like(ids);
      length = 3 + (length + 5) % (ids.size(1) - 3);
      mask[0].narrow(0, length, ids.size(1) - length).zero_();
      fields["attention_mask"] = mask;
      fields["token_type_ids"] = ids.remainder(2);
      fields.erase(without);
    }
  }
  return batches;
}

}  // namespace twobp::test
