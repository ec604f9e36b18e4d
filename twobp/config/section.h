// A section of the configuration: a struct whose owner registers its keys.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "twobp/config/key.h"

namespace twobp {

struct Section {
  std::string name;
  std::vector<Key> keys;
  std::shared_ptr<void> defaults;  // a struct as its constructor makes it; only read
};

template <typename Struct>
Section make_section(std::string name, std::vector<Key> keys) {
  return {std::move(name), std::move(keys), std::make_shared<Struct>()};
}

// A section and a struct with its values.
struct SectionValues {
  const Section* section = nullptr;
  void* values = nullptr;
};

// A value of a section that is one of several structs, each with further keys of that section: model.type.
class Choice {
 public:
  virtual ~Choice() = default;
  virtual const std::string& name() const = 0;
  // The struct of that name with its default values. The name is one of alternatives()'.
  virtual void choose(const std::string& name) = 0;
  // The chosen struct; its section's `name` is the choice's.
  virtual SectionValues chosen() = 0;
  virtual std::vector<const Section*> alternatives() const = 0;
};

}  // namespace twobp
