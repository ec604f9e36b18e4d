// Configuration keys that several model types share.
#pragma once

#include <utility>

#include "twobp/config/key.h"

namespace twobp {

template <typename Options>
Key vocab_key() {
  return TWOBP_KEY(Options, vocab,
                   "size of the vocabulary; 256 for data.text without a tokenizer, whose tokens are bytes")
      .in("tokens")
      .from(1, kMaxLength);
}

template <typename Options>
Key pad_token_key() {
  return TWOBP_KEY(Options, pad_token, "id of the padding token, whose embedding is not trained; -1: none")
      .from(-1, kMaxLength);
}

template <typename Options>
Key init_std_key() {
  return TWOBP_KEY(Options, init_std, "standard deviation of the initial weights")
      .at_least(0)
      .freely_tuned()
      .free_on_resume();
}

inline Key dropout_key(Key key) {
  return std::move(key).from_to_below(0, 1).freely_tuned();
}

}  // namespace twobp
