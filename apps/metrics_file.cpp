#include "apps/metrics_file.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/files/new_file.h"

namespace twobp {

using nlohmann::json;

MetricsFile::MetricsFile(std::string path) : path_(std::move(path)) {
  if (!path_.empty()) open(std::ios::app);
}

void MetricsFile::clear() {
  if (path_.empty()) return;
  file_.close();
  open(std::ios::trunc);
}

void MetricsFile::open(std::ios::openmode mode) {
  file_.open(path_, std::ios::out | mode);
  TWOBP_CHECK(file_.good(), "cannot write ", path_, ": ", std::strerror(errno));
}

void MetricsFile::keep_until(int64_t step) {
  if (path_.empty() || !std::filesystem::is_regular_file(path_)) return;
  file_.close();
  {
    std::ifstream old(path_);
    NewFile kept(path_);
    for (std::string line; std::getline(old, line);) {
      const json value = json::parse(line, nullptr, /*allow_exceptions=*/false);
      if (!value.is_object() || !value.contains("step") || !value["step"].is_number_integer()) continue;
      if (value["step"].get<int64_t>() > step) continue;
      line += '\n';
      kept.write(line.data(), line.size());
    }
    kept.commit();
  }
  open(std::ios::app);
}

void MetricsFile::write(const json& line) {
  if (path_.empty()) return;
  file_ << line.dump() << std::endl;
  TWOBP_CHECK(file_.good(), "cannot write ", path_, ": ", std::strerror(errno));
}

}  // namespace twobp
