// The file of --metrics: one JSON object a step, each step once, also over runs that were stopped and
// resumed.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>

#include <nlohmann/json.hpp>

namespace twobp {

class MetricsFile {
 public:
  // Opens the file and leaves what is there. No file if `path` is empty. All members throw Error, naming the
  // file.
  explicit MetricsFile(std::string path);

  // Begins an empty file.
  void clear();

  // Drops lines of steps after `step` (done after the checkpoint, and done again now), and what is no JSON
  // (the end of a line that was cut off). Only of an ordinary file.
  void keep_until(int64_t step);
  void write(const nlohmann::json& line);

 private:
  void open(std::ios::openmode mode);

  std::string path_;
  std::ofstream file_;
};

}  // namespace twobp
