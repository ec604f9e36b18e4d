// The file of --metrics: one JSON object for each step, each step once, even if the run was stopped and resumed.
#pragma once

#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

namespace twobp {

class MetricsFile {
 public:
  // Opens the file and keeps its content. If `path` is empty, there is no file. All members throw Error, which names
  // the file.
  explicit MetricsFile(std::string path);
  ~MetricsFile();
  MetricsFile(const MetricsFile&) = delete;
  MetricsFile& operator=(const MetricsFile&) = delete;

  // Empties the file.
  void clear();

  // Drops lines of steps after `step`, which were done after the checkpoint and will be done again. Also drops lines
  // that are not JSON, because they were cut off. Does this only for an ordinary file.
  void keep_until(int64_t step);
  // Waits for a slow reader of a pipe. If a signal stops the run meanwhile, the line is lost.
  void write(const nlohmann::json& line);

 private:
  void open();
  void close();
  [[noreturn]] void fail_to_write() const;

  std::string path_;
  int fd_ = -1;
};

}  // namespace twobp
