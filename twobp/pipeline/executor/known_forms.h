// The forms of messages that both of their ends know, because earlier ones came with a description. A message's form
// follows from its stage and the sizes of its micro-batch. Sender and receiver learn from the same messages and decide
// at the same steps, so they agree on which ones come without.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "twobp/nn/context.h"
#include "twobp/transport/transport.h"

namespace twobp {

class KnownForms {
 public:
  // Of a micro-batch.
  using Sizes = std::vector<std::tuple<std::string, std::vector<int64_t>, at::ScalarType>>;
  static Sizes sizes_of(const Fields& fields);

  // Null: not known, or forms vary.
  const Forms* find(MessageKind kind, int stage, const Sizes& sizes) const;
  // `values`: of a message that came, or goes, with a description. One that does not lie on a device of type `device`
  // always has one.
  void learn(MessageKind kind, int stage, const Sizes& sizes, const Values& values, at::DeviceType device);
  // From now on, what the step's messages have taught counts.
  void end_step();

  // Whether the transport has messages without a description, once it was asked.
  std::optional<bool> useful;

 private:
  using Key = std::tuple<MessageKind, int, Sizes>;
  std::map<Key, std::optional<Forms>> known_, learned_;  // none: they vary
  std::map<std::pair<MessageKind, int>, int> counts_;    // of known ones
};

}  // namespace twobp
