// A Python script that runs next to the program and answers over pipes, for work that only a Python package does.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <sys/types.h>
#include <vector>

namespace twobp {

// $TWOBP_PYTHON, else the Python of the active virtual environment ($VIRTUAL_ENV), else that of .venv in the folder of
// the sources that this library was built from, else python3 from the PATH.
std::string find_python();

// Starts the script (its text, not its path) at once, without a shell, with `arguments` as sys.argv[1:]. Its stdin and
// stdout are pipes, and its stderr becomes part of error messages. Every member throws Error that begins with `name` if
// Python cannot be started, the script ended or was killed (with the last line of its stderr), or no data moved for
// `timeout` seconds. Only one thread at a time may use it.
class PythonProcess {
 public:
  PythonProcess(std::string name, const std::string& script, const std::vector<std::string>& arguments, double timeout);
  // Kills the script. It must hold nothing of value.
  ~PythonProcess();
  PythonProcess(const PythonProcess&) = delete;
  PythonProcess& operator=(const PythonProcess&) = delete;

  // Returns when the script, or its pipe, has accepted all bytes.
  void write(std::string_view bytes);
  // Returns the text up to the next newline, without the newline.
  std::string read_line();
  std::string read(size_t bytes);

 private:
  // Waits until the script accepts or sends data, and then transfers it.
  void exchange(std::string_view& to_write);
  [[noreturn]] void ended();

  std::string name_;
  std::string python_;
  double timeout_;
  pid_t pid_ = -1;
  int in_ = -1;         // its stdin
  int out_ = -1;        // its stdout
  int err_ = -1;        // its stderr; -1 once the script has closed it
  std::string unread_;  // from its stdout
  std::string errors_;  // the end of its stderr
};

}  // namespace twobp
