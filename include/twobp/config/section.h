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
  std::shared_ptr<void> defaults;  // a default-constructed struct; only read
  std::string group{};             // of a choice: the common name of several, for --help; empty: none
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

// A value that selects one of several structs, each with additional keys of the section: model.type.
class Choice {
 public:
  virtual ~Choice() = default;
  virtual const std::string& name() const = 0;
  // Selects the struct of that name, with its default values. The name must be one of alternatives().
  virtual void choose(const std::string& name) = 0;
  // The selected struct. The `name` of its section is the choice's name.
  virtual SectionValues chosen() = 0;
  virtual std::vector<const Section*> alternatives() const = 0;
};

}  // namespace twobp
