// A section of the configuration: a struct whose owner lists its keys once, each with its name, its place in the
// struct, and its traits. Reading, --set, --print-config, --help, the checks and the comparison of runs all use that
// list.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace twobp {

// A key of the configuration: its name, its place in a struct, and its traits. The owner of a struct lists its keys
// once (see section.h). Reading, --set, --print-config, --help, the checks and the comparison of runs all use that
// list.

class Choice;

// A pointer to the value. The alternative is the key's type.
using Field = std::variant<bool*, int*, int64_t*, uint64_t*, double*, std::string*, std::vector<int>*,
                           std::vector<std::string>*, std::vector<double>*, Choice*>;

// The allowed values of a key: one of `choices` unless that is empty, or a number within the bounds. An empty text is
// allowed if it is the default.
struct Allowed {
  std::vector<std::string> choices;
  std::string file;  // file names with this ending are also allowed; in JSON also {"file": "name.csv"}
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool above_min = false;  // min itself is excluded
  bool below_max = false;

  bool contains(double value) const;
  // "one of a, b", "at least 1", "from 0 to below 1", or "" if anything is allowed.
  std::string text() const;
};

// The reaction of a resumed run to a value that differs from the checkpoint's.
enum class OnResume : uint8_t {
  kSame,   // refuses to start
  kNoted,  // continues, and says that the course of the run changes
  kFree,   // continues
};

// Bounds far beyond use. They catch typing errors, and keep products of sizes within 64 bits.
inline constexpr double kMaxWidth = 1 << 20;
inline constexpr double kMaxCount = 1 << 16;
inline constexpr double kMaxLength = 1 << 24;
inline constexpr double kMaxSteps = 1e12;

struct Key {
  std::string name;
  Field (*field)(void* values) = nullptr;
  std::string_view type;  // "boolean", "integer", "number", "text", "list of integers", "list of texts", ...
  std::string meaning;
  std::string unit{};  // empty: none
  Allowed allowed{};
  OnResume on_resume = OnResume::kSame;
  bool per_process = false;  // may differ between the processes of a run: paths and properties of the machine
  // A key of a model that does not shape the weights, so it may differ from the value in the weights' directory.
  bool tunable = false;

  Key in(std::string unit) &&;
  Key from(double min, double max) &&;
  Key from_to_below(double min, double max) &&;
  Key above_to(double min, double max) &&;
  Key at_least(double min) &&;
  Key above(double min) &&;
  Key one_of(std::vector<std::string> choices) &&;
  Key or_file(std::string ending) &&;
  Key noted_on_resume() &&;
  Key free_on_resume() &&;
  Key differs_by_process() &&;
  // For paths: free on resume, and each process may have its own.
  Key path() &&;
  Key freely_tuned() &&;
};

std::string_view type_name(const Field& field);

// A key with the name of its struct member. Use TWOBP_KEY, so that the names cannot differ.
template <auto Member, typename Struct>
Key make_key(const char* name, const char* meaning) {
  using Value = std::remove_reference_t<decltype(std::declval<Struct&>().*Member)>;
  return {name, [](void* values) -> Field { return &(static_cast<Struct*>(values)->*Member); },
          type_name(static_cast<Value*>(nullptr)), meaning};
}
#define TWOBP_KEY(Struct, member, meaning) ::twobp::make_key<&Struct::member, Struct>(#member, meaning)

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
