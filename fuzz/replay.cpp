// Runs a fuzz target without libFuzzer: on every file of the corpus, and then on mutations of them, which are always
// the same. libFuzzer searches for new paths. This program checks, with any compiler, that the errors found remain
// fixed.
//
//   fuzz_npy FILE_OR_FOLDER... [--runs N] [--seconds S]     at most N mutations, for at most S seconds
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <unistd.h>

#include "fuzz/input.h"

namespace {

using Bytes = std::vector<uint8_t>;

constexpr const char* kCrashFile = "fuzz-crash";  // in the working folder; libFuzzer calls it crash-HASH

Bytes current;

// Only functions that are allowed in a signal handler are called here.
extern "C" void keep_input(int signal) {
  const int fd = ::open(kCrashFile, O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (fd >= 0 && ::write(fd, current.data(), current.size()) >= 0) {
    constexpr char kNote[] = "fuzz: the input is in ./fuzz-crash\n";
    (void)!::write(STDERR_FILENO, kNote, sizeof(kNote) - 1);
  }
  std::signal(signal, SIG_DFL);
  ::raise(signal);
}

void run(const Bytes& input) {
  current = Bytes(input);  // this exact size reveals reads past the end
  LLVMFuzzerTestOneInput(current.data(), current.size());
}

class Mutator {
 public:
  explicit Mutator(const std::vector<Bytes>& corpus) : corpus_(corpus) {}

  Bytes next() {
    Bytes bytes = corpus_[below(corpus_.size())];
    for (size_t left = 1 + below(4); left > 0; --left) mutate(bytes);
    return bytes;
  }

 private:
  size_t below(size_t bound) { return bound == 0 ? 0 : random_() % bound; }

  void mutate(Bytes& bytes) {
    const size_t at = below(bytes.size() + 1);
    const size_t length = std::min(below(below(5) == 0 ? 400 : 9) + 1, bytes.size() - at);
    const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    const auto end = begin + static_cast<std::ptrdiff_t>(length);
    constexpr uint8_t kTelling[] = {0, 1, 0x7f, 0x80, 0xff, '"', '{', '}', '[', ']', ',', '-', '9', 'e', '\n'};
    switch (below(7)) {
      case 0:
        if (length > 0) *begin ^= static_cast<uint8_t>(1U << below(8));
        return;
      case 1:
        if (length > 0) *begin = kTelling[below(std::size(kTelling))];
        return;
      case 2:
        bytes.insert(begin, kTelling[below(std::size(kTelling))]);
        return;
      case 3:
        bytes.erase(begin, end);
        return;
      case 4: {
        const Bytes piece(begin, end);
        const auto to = bytes.begin() + static_cast<std::ptrdiff_t>(below(bytes.size() + 1));
        bytes.insert(to, piece.begin(), piece.end());
        return;
      }
      case 5: {
        const Bytes& other = corpus_[below(corpus_.size())];  // splice the end of another input
        const size_t from = below(other.size() + 1);
        bytes.erase(begin, bytes.end());
        bytes.insert(bytes.end(), other.begin() + static_cast<std::ptrdiff_t>(from), other.end());
        return;
      }
      default:
        bytes.erase(begin, bytes.end());
        return;
    }
  }

  const std::vector<Bytes>& corpus_;
  std::mt19937_64 random_{1};
};

Bytes read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<Bytes> read_inputs(std::vector<std::filesystem::path> paths) {
  std::vector<std::filesystem::path> files;
  for (const auto& path : paths) {
    if (!std::filesystem::is_directory(path)) {
      files.push_back(path);
      continue;
    }
    for (const auto& entry : std::filesystem::directory_iterator(path)) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  std::vector<Bytes> inputs;
  for (const auto& file : files) inputs.push_back(read_file(file));
  return inputs;
}

}  // namespace

int main(int argc, char** argv) {
  int64_t runs = 0;
  double seconds = 1e9;
  std::vector<std::filesystem::path> paths;
  for (int i = 1; i < argc; ++i) {
    const bool value = i + 1 < argc;
    if (value && std::strcmp(argv[i], "--runs") == 0) {
      runs = std::atoll(argv[++i]);
    } else if (value && std::strcmp(argv[i], "--seconds") == 0) {
      seconds = std::atof(argv[++i]);
    } else {
      paths.emplace_back(argv[i]);
    }
  }
  for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) std::signal(signal, keep_input);
  const std::vector<Bytes> corpus = read_inputs(std::move(paths));
  if (corpus.empty()) {
    std::fprintf(stderr, "no inputs: give files or folders of the corpus\n");
    return 1;
  }
  for (const Bytes& input : corpus) run(input);
  const auto begin = std::chrono::steady_clock::now();
  Mutator mutator(corpus);
  int64_t done = 0;
  while (done < runs && std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() < seconds) {
    run(mutator.next());
    ++done;
  }
  std::printf("%zu inputs of the corpus, %lld mutations of them\n", corpus.size(), static_cast<long long>(done));
  return 0;
}
