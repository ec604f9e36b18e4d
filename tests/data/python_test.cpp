// Tests a Python script beside the program: both directions of the pipes, and every way in which it can fail.
#include "twobp/data/text/python.h"

#include <filesystem>

#include <gtest/gtest.h>

#include "tokenizer_files.h"
#include "twobp/core/check.h"
#include "twobp/core/measure.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::Environment;
using test::expect_error;
using test::TempFolder;
using test::write_program;

constexpr double kLong = 60;

class Python : public testing::Test {
 protected:
  void SetUp() override {
    try {
      PythonProcess("probe", "print(1, flush=True)", {}, kLong).read_line();
    } catch (const Error& error) {
      GTEST_SKIP() << error.what();
    }
  }
};

TEST_F(Python, PassesArgumentsToTheScriptUnchanged) {
  const TempFolder folder;
  PythonProcess python("test", "import sys, json; print(json.dumps(sys.argv[1:]))",
                       {"a b", "", "$HOME", "; touch " + folder.path("x"), "\"'"}, kLong);
  EXPECT_EQ(python.read_line(), R"(["a b", "", "$HOME", "; touch )" + folder.path("x") + R"(", "\"'"])");
  EXPECT_FALSE(std::filesystem::exists(folder.path("x")));
}

// The program must not execute a file from the current folder, because somebody else may have put it there.
TEST(FindPython, IgnoresTheCurrentFolder) {
  const TempFolder folder;
  std::filesystem::create_directories(folder.path(".venv/bin"));
  const std::string planted = write_program(folder, ".venv/bin/python", "exit 7");
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path(""));
  const Environment no_choice("TWOBP_PYTHON", "");
  {
    const Environment relative("VIRTUAL_ENV", ".venv");
    EXPECT_NE(std::filesystem::absolute(find_python()), planted);
  }
  {
    const Environment none("VIRTUAL_ENV", "");
    EXPECT_NE(std::filesystem::absolute(find_python()), planted);
  }
  {
    const Environment active("VIRTUAL_ENV", folder.path(".venv"));
    EXPECT_EQ(find_python(), folder.path(".venv/bin/python")) << "an activated environment comes first";
  }
  std::filesystem::current_path(before);
}

TEST_F(Python, SendsLinesAndBytesBothWays) {
  PythonProcess python("test",
                       "import sys\n"
                       "for line in sys.stdin.buffer:\n"
                       "  sys.stdout.buffer.write(line.upper() + b'\\0\\n\\xff'); sys.stdout.flush()\n",
                       {}, kLong);
  for (int i = 0; i < 3; ++i) {
    python.write("abc\n");
    EXPECT_EQ(python.read_line(), "ABC");
    EXPECT_EQ(python.read(3), std::string("\0\n\xff", 3));
  }
}

// Megabytes go in both directions and to stderr before the script reads anything. That is more than pipes hold.
TEST_F(Python, NeitherSideWaitsForTheOther) {
  PythonProcess python("test",
                       "import sys\n"
                       "sys.stderr.write('noise\\n' * 500000)\n"
                       "sys.stdout.buffer.write(b'a' * (4 << 20)); sys.stdout.flush()\n"
                       "got = sys.stdin.buffer.read(4 << 20)\n"
                       "print(len(got), got == b'b' * len(got), flush=True)\n",
                       {}, kLong);
  python.write(std::string(4 << 20, 'b'));
  EXPECT_EQ(python.read(4 << 20), std::string(4 << 20, 'a'));
  EXPECT_EQ(python.read_line(), "4194304 True");
}

TEST_F(Python, ReportsTheLastWordsOfAScriptThatEnds) {
  PythonProcess exits("the name", "import sys; print('why\\n\\n', file=sys.stderr); sys.exit(3)", {}, kLong);
  expect_error([&] { exits.read_line(); }, {"the name: ", "exit code 3: why."});
  PythonProcess raises("test", "raise ValueError('bad value')", {}, kLong);
  expect_error([&] { raises.read(1); }, {"exit code 1: ValueError: bad value."});
  PythonProcess half("test", "print('half a li', end='')", {}, kLong);
  expect_error([&] { half.read_line(); }, {"ended too early with exit code 0."});
  PythonProcess killed("test", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", {}, kLong);
  expect_error([&] { killed.read_line(); }, {"killed by signal 9", "memory"});
  PythonProcess garbage("test", "this is no Python", {}, kLong);
  expect_error([&] { garbage.read_line(); }, {"SyntaxError"});
}

TEST_F(Python, ReportsWritingToAScriptThatEnded) {
  PythonProcess python("test", "print('bye', flush=True)", {}, kLong);
  EXPECT_EQ(python.read_line(), "bye");
  expect_error(
      [&] {
        for (int i = 0; i < 1000; ++i) python.write(std::string(1 << 16, 'x'));
      },
      {"ended too early with exit code 0"});
}

TEST_F(Python, GivesUpAScriptThatHangs) {
  const double begin = now_seconds();
  PythonProcess python("test", "import sys, time; print('zzz', file=sys.stderr, flush=True); time.sleep(100)", {}, 1.0);
  expect_error([&] { python.read_line(); }, {"did nothing for 1.0s", "zzz"});
  PythonProcess deaf("test", "import time; time.sleep(100)", {}, 0.2);
  expect_error(
      [&] {
        for (int i = 0; i < 1000; ++i) deaf.write(std::string(1 << 16, 'x'));
      },
      {"did nothing"});
  EXPECT_LT(now_seconds() - begin, 30);
}

TEST(PythonNotThere, IsAClearError) {
  const TempFolder folder;
  const Environment python("TWOBP_PYTHON", folder.path("no_python"));
  expect_error([] { PythonProcess("test", "", {}, kLong); },
               {"test: cannot start ", "no_python", "No such file", "TWOBP_PYTHON"});
}

TEST(PythonNotThere, TheEnvironmentNamesIt) {
  const TempFolder folder;
  const Environment python("TWOBP_PYTHON", write_program(folder, "python", "echo \"$1 $2 $3\""));
  PythonProcess process("test", "script", {"argument"}, kLong);
  EXPECT_EQ(process.read_line(), "-c script argument");
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
