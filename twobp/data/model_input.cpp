#include "twobp/data/data_config.h"

namespace twobp {

std::string_view item_name(InputKind kind) {
  switch (kind) {
    case InputKind::kImages:
      return "images";
    case InputKind::kVectors:
      return "vectors";
    case InputKind::kFields:
      return "items";
    default:
      return "tokens";
  }
}

}  // namespace twobp
