// Prints the program's text and tables on standard output, its messages on standard error, and prepares the descriptors
// under them.
#pragma once

#include <string>
#include <vector>

#include "twobp/core/text.h"

namespace twobp {

// Call first. Opens /dev/null for those of standard input, output and error that are closed, because the next
// file would take their place. From now on, a file that grows beyond `ulimit -f` is an error, not a signal.
void prepare_descriptors();

// Returns whether a person watches the descriptor. It is false under mpirun, which gives its processes
// terminals of its own even if the text goes to a file.
bool is_terminal(int descriptor);

// Waits until the descriptor takes text. Returns false if a signal asked this process to stop meanwhile.
bool wait_writable(int descriptor);

// Prints like printf, and flushes. Control characters other than newlines and tabs are shown as escapes,
// because names in files may contain them. check_output() reports errors.
void print(const char* format, ...) __attribute__((format(printf, 1, 2)));
// Prints text whose control characters come from the program itself.
void print_as_is(const std::string& text);

// Prints a message on standard error, in one line, and in color if a person watches. Control characters are shown as
// escapes.
void log_error(const std::string& message);
void log_warning(const std::string& message);

// Prints a table. Columns are as wide as their widest entry. The first is left-aligned, the others are
// right-aligned.
void print_table(std::vector<std::vector<std::string>> rows);

// Call this last. Throws Error if standard output did not take all text. If a signal stops the run, it does
// not throw, because the reader may be gone.
void check_output();

}  // namespace twobp
