// The program's text on standard output, and the descriptors under it.
#pragma once

#include <string>

namespace twobp {

// Call first. Opens /dev/null for those of standard input, output and error that are closed, because the next
// file would take their place. From now on, a file that grows beyond `ulimit -f` is an error, not a signal.
void prepare_descriptors();

// Whether a person watches the descriptor. mpirun connects its processes to terminals of its own, whatever
// becomes of the text.
bool is_terminal(int descriptor);

// Waits until the descriptor takes text. Returns false if a signal asked this process to stop meanwhile.
bool wait_writable(int descriptor);

// As printf, and flushes. Control characters other than newlines and tabs are shown as escapes, because names
// in files may hold any. check_output() reports errors.
void print(const char* format, ...) __attribute__((format(printf, 1, 2)));
// Text with control characters of our own.
void print_as_is(const std::string& text);

// Call last. Throws Error if standard output did not take all that was written to it, unless a signal stops
// the run: then its reader may be gone.
void check_output();

}  // namespace twobp
