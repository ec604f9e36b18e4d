#include "tests/graph/operator_sweep/changed_call.h"

#include <array>
#include <cmath>
#include <limits>
#include <map>

namespace twobp::test {
namespace {

using nlohmann::json;

const std::map<std::string, at::ScalarType>& dtypes() {
  static const std::map<std::string, at::ScalarType> all = {
      {"float32", at::kFloat}, {"float64", at::kDouble}, {"bfloat16", at::kBFloat16}, {"float16", at::kHalf},
      {"int64", at::kLong},    {"int32", at::kInt},      {"int16", at::kShort},       {"int8", at::kChar},
      {"uint8", at::kByte},    {"bool", at::kBool}};
  return all;
}

template <typename List>
auto one_of(const List& list, Random& random) {
  return *std::next(std::begin(list), static_cast<long>(random() % std::size(list)));
}

bool chance(int of, Random& random) {
  return random() % static_cast<uint64_t>(of) == 0;
}

int64_t integer(int64_t now, Random& random) {
  constexpr int64_t kBig = int64_t{1} << 40;
  const std::array<int64_t, 20> some = {now + 1,   now - 1, now * 2, now / 2, -now,      0,        1,
                                        -1,        2,       3,       5,       -2,        -7,       17,
                                        INT32_MAX, 1000,    kBig,    -kBig,   INT64_MAX, INT64_MIN};
  return one_of(some, random);
}

double number(Random& random) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  constexpr std::array<double, 12> kSome = {0, -1, 1, 0.5, -0.3, 2.7, 1e9, -1e18, 1e300, kInf, -kInf, std::nan("")};
  return one_of(kSome, random);
}

json as_json(double value) {
  if (std::isfinite(value)) return value;
  return {{"float", std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf"}};
}

void make_contiguous(json& tensor) {
  json strides = json::array();
  int64_t step = 1;
  for (size_t i = tensor[1].size(); i-- > 0;) {
    strides.insert(strides.begin(), step);
    step *= std::max<int64_t>(tensor[1][i].get<int64_t>(), 1);
  }
  tensor[2] = strides;
}

void change_sizes(json& tensor, Random& random) {
  json& sizes = tensor[1];
  const uint64_t how = random() % 8;
  if (how == 0 || sizes.empty()) {
    sizes.insert(sizes.begin() + static_cast<long>(random() % (sizes.size() + 1)), chance(2, random) ? 1 : 3);
  } else if (how == 1) {
    sizes.erase(random() % sizes.size());
  } else if (how == 2) {
    std::swap(sizes[random() % sizes.size()], sizes[random() % sizes.size()]);
  } else {
    json& size = sizes[random() % sizes.size()];
    const auto now = size.get<int64_t>();
    const std::array<int64_t, 9> some = {now + 1, std::max<int64_t>(now - 1, 0), now * 2, now / 2, 0, 1, 2, 3, 33};
    size = one_of(some, random);
  }
  make_contiguous(tensor);
}

void change_strides(json& tensor, Random& random) {
  const size_t dims = tensor[1].size();
  if (dims == 0) return;
  json& stride = tensor[2][random() % dims];
  switch (random() % 5) {
    case 0:
      stride = 0;
      return;
    case 1:
      stride = stride.get<int64_t>() + 1;
      return;
    case 2: {  // other places in memory, the same sizes
      std::vector<size_t> order(dims);
      for (size_t i = 0; i < dims; ++i) order[i] = i;
      std::shuffle(order.begin(), order.end(), random);
      int64_t step = 1;
      for (const size_t i : order) {
        tensor[2][i] = step;
        step *= std::max<int64_t>(tensor[1][i].get<int64_t>(), 1);
      }
      return;
    }
    case 3:
      for (json& one : tensor[2]) one = one.get<int64_t>() * 2;
      return;
    default:  // as expand gives it
      tensor[1][random() % dims] = chance(3, random) ? int64_t{1} << 33 : 7;
      for (json& one : tensor[2]) one = 0;
  }
}

void change_tensor(json& tensor, const std::vector<json>& others, Random& random) {
  const bool whole = tensor.size() > 3 && tensor[3].is_array();
  switch (random() % 6) {
    case 0:
    case 1:
      return change_sizes(tensor, random);
    case 2:
      return change_strides(tensor, random);
    case 3:
      tensor[0] = one_of(dtypes(), random).first;
      return;
    case 4:
      if (whole) {
        if (tensor[3].empty()) return;
        for (uint64_t left = 1 + random() % 3; left > 0; --left) {
          json& one = tensor[3][random() % tensor[3].size()];
          one = integer(one.get<int64_t>(), random);
        }
      } else {
        tensor[4] = true;  // extreme numbers
      }
      return;
    default: {
      const json& other = others[random() % others.size()]["tensors"];
      if (!other.empty()) tensor = other[random() % other.size()];
    }
  }
}

void change_list(json& list, Random& random) {
  const uint64_t how = random() % 4;
  if (how == 0) {
    list.push_back(list.empty() ? json(1) : list[random() % list.size()]);
  } else if (how == 1 && !list.empty()) {
    list.erase(random() % list.size());
  } else if (how == 2) {
    list = json::array();
  } else {
    for (json& one : list) {
      if (one.is_number_integer() && chance(2, random))
        one = integer(one.get<int64_t>(), random);
      else if (one.is_number_float())
        one = as_json(number(random));
      else if (one.is_boolean())
        one = chance(2, random);
    }
  }
}

void change_argument(json& argument, size_t tensors, Random& random) {
  if (argument.is_null()) {
    constexpr std::array<int64_t, 3> kNumbers = {0, 1, -1};
    switch (random() % 4) {
      case 0:
        argument = json{{"v", tensors == 0 ? 0 : random() % tensors}};
        return;
      case 1:
        argument = one_of(kNumbers, random);
        return;
      case 2:
        argument = as_json(number(random));
        return;
      default:
        argument = json{{"dtype", one_of(dtypes(), random).first}};
        return;
    }
  }
  if (chance(12, random)) {
    argument = nullptr;
  } else if (argument.is_array()) {
    change_list(argument, random);
  } else if (argument.is_boolean()) {
    argument = !argument.get<bool>();
  } else if (argument.is_number_integer()) {
    argument = chance(8, random) ? as_json(number(random)) : json(integer(argument.get<int64_t>(), random));
  } else if (argument.is_number_float()) {
    argument = as_json(number(random));
  } else if (argument.is_object() && argument.contains("v") && tensors > 0) {
    argument["v"] = random() % tensors;
  } else if (argument.is_object() && argument.contains("dtype")) {
    argument["dtype"] = one_of(dtypes(), random).first;
  } else if (argument.is_object() && argument.contains("number")) {
    argument["number"] = as_json(number(random));
  }
}

}  // namespace

Call changed(Call call, const std::vector<Call>& others, Random& random) {
  for (uint64_t left = 1 + random() % 3; left > 0; --left) {
    json& tensors = call["tensors"];
    json& args = call["args"];
    if (!tensors.empty() && !chance(3, random)) {
      change_tensor(tensors[random() % tensors.size()], others, random);
    } else if (!args.empty()) {
      change_argument(args[random() % args.size()], tensors.size(), random);
    }
  }
  return call;
}

at::Tensor make_tensor(const Call& description, Random& random) {
  const at::ScalarType dtype = dtypes().at(description[0].get<std::string>());
  const auto sizes = description[1].get<std::vector<int64_t>>();
  const auto strides = description[2].get<std::vector<int64_t>>();
  int64_t last = 1;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) last = 0;
    if (last > 0) last += (sizes[i] - 1) * strides[i];
  }
  const bool extreme = description.size() > 4 && description[4] == true;
  const bool probabilities = description.size() > 3 && description[3] == "probabilities";
  const json* values =
      description.size() > 3 && description[3].is_array() && !description[3].empty() ? &description[3] : nullptr;
  at::Tensor numbers =
      at::empty({last}, dtype == at::kBool || at::isIntegralType(dtype, false) ? at::kLong : at::kDouble);
  std::normal_distribution<double> normal;
  for (int64_t i = 0; i < last; ++i) {
    if (numbers.scalar_type() == at::kDouble) {
      numbers.data_ptr<double>()[i] =
          extreme && chance(3, random) ? number(random)
          : values != nullptr ? static_cast<double>((*values)[static_cast<size_t>(i) % values->size()].get<int64_t>())
          : probabilities     ? static_cast<double>(random() % 1000) / 999
                              : normal(random);
    } else {
      numbers.data_ptr<int64_t>()[i] = extreme && chance(3, random) ? integer(0, random)
                                       : values != nullptr
                                           ? (*values)[static_cast<size_t>(i) % values->size()].get<int64_t>()
                                           : static_cast<int64_t>(random() % 3);
    }
  }
  if (dtype == at::kBool) numbers = numbers.ne(0);
  at::Tensor own = at::empty({last}, dtype);
  own.copy_(numbers);
  return own.as_strided(sizes, strides);
}

}  // namespace twobp::test
