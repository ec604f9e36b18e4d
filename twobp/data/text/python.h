// A Python script that runs beside the program and answers over pipes: for what only a Python package does.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <sys/types.h>
#include <vector>

namespace twobp {

// $TWOBP_PYTHON, else .venv/bin/python under the current folder if it is there, else python3 of the PATH.
std::string find_python();

// The script (its text, not its path) is started at once, without a shell, with `arguments` as sys.argv[1:].
// Its stdin and stdout are pipes, and what it writes to stderr ends up in the messages of errors. Every
// member throws Error, which opens with `name`: Python cannot be started, the script ended or was killed
// (with the last line it wrote to stderr), or nothing moved for `timeout` seconds. For one thread at a time.
class PythonProcess {
 public:
  PythonProcess(std::string name, const std::string& script, const std::vector<std::string>& arguments,
                double timeout);
  // Kills the script: it is to keep nothing that matters.
  ~PythonProcess();
  PythonProcess(const PythonProcess&) = delete;
  PythonProcess& operator=(const PythonProcess&) = delete;

  // Returns when the script has taken all of it, or its pipe has.
  void write(std::string_view bytes);
  // Up to and without the next newline.
  std::string read_line();
  std::string read(size_t bytes);

 private:
  // Waits for the script to take or give something, and takes what there is.
  void exchange(std::string_view& to_write);
  [[noreturn]] void ended();

  std::string name_;
  std::string python_;
  double timeout_;
  pid_t pid_ = -1;
  int in_ = -1;         // its stdin
  int out_ = -1;        // its stdout
  int err_ = -1;        // its stderr; -1 once it has closed that
  std::string unread_;  // of its stdout
  std::string errors_;  // the end of what it wrote to stderr
};

}  // namespace twobp
