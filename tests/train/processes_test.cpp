// Tests the messages between the processes of a run, which are threads here.
#include "twobp/transport/processes.h"

#include <mutex>
#include <thread>

#include <gtest/gtest.h>

#include "tests/expect_error.h"
#include "twobp/core/check.h"
#include "twobp/transport/threads/in_process.h"

namespace twobp::TWOBP_FILE {
namespace {

// Runs body on `count` processes. Returns the exception of each process: "", "Error: ..." or "Aborted: ...".
std::vector<std::string> run(int count, const std::function<void(const Processes&)>& body, double timeout = 20) {
  const auto ends = make_in_process_transports(count, 0);
  std::vector<std::string> thrown(count);
  std::vector<std::thread> threads;
  for (int p = 0; p < count; ++p) {
    threads.emplace_back([&, p] {
      try {
        const Processes processes(*ends[p], timeout);
        EXPECT_EQ(processes.index(), p);
        EXPECT_EQ(processes.count(), count);
        body(processes);
      } catch (const Aborted& e) {
        thrown[p] = concat("Aborted: ", e.what());
      } catch (const Error& e) {
        thrown[p] = concat("Error: ", e.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return thrown;
}

TEST(Processes, ExchangeTexts) {
  for (const int count : {1, 2, 4}) {
    const auto thrown = run(count, [&](const Processes& processes) {
      for (const std::string& text : {std::string("first"), std::string(), std::string(100'000, 'x')}) {
        EXPECT_EQ(processes.from_first(processes.is_first() ? text : "mine"), text);
        const auto all = processes.to_first(concat(text, processes.index()));
        ASSERT_EQ(all.size(), processes.is_first() ? static_cast<size_t>(count) : 0U);
        for (size_t p = 0; p < all.size(); ++p) EXPECT_EQ(all[p], concat(text, p));
      }
      const auto tensors = processes.tensors_to_first({at::full({2}, processes.index())});
      for (size_t p = 0; p < tensors.size(); ++p)
        EXPECT_EQ(tensors[p].at(0)[1].item<int64_t>(), static_cast<int64_t>(p));
    });
    EXPECT_EQ(thrown, std::vector<std::string>(count));
  }
  const Processes alone;
  EXPECT_EQ(alone.from_first("a"), "a");
  EXPECT_EQ(alone.to_first("a"), std::vector<std::string>{"a"});
  EXPECT_EQ(alone.writes({"a", "b"}), (std::vector<bool>{true, true}));
  alone.throw_if_aborted();
  test::expect_error([&] { alone.together([] { fail("mine"); }); }, {"mine"});
}

// The failing process has the error, and the others report its failure. Afterwards they continue together.
TEST(Processes, ReportTheFailureOfOne) {
  for (const int failing : {0, 2}) {
    const auto thrown = run(3, [&](const Processes& processes) {
      try {
        processes.together([&] {
          if (processes.index() == failing) fail("no room");
        });
        ADD_FAILURE() << "nothing thrown on " << processes.index();
      } catch (const std::exception&) {
        EXPECT_EQ(processes.from_first("still there"), "still there");
        throw;
      }
    });
    for (int p = 0; p < 3; ++p) {
      EXPECT_EQ(thrown[p], p == failing ? "Error: no room" : concat("Aborted: process ", failing, ": no room"));
    }
  }
}

// Writing files may take longer than any message. A silent process counts as stuck.
TEST(Processes, WaitForAProcessAtWork) {
  const double timeout = 1;
  std::vector<std::thread> runs;  // they wait at the same time
  for (const int slow : {0, 1, 2}) {
    runs.emplace_back([=] {
      const auto thrown = run(
          3,
          [&](const Processes& processes) {
            processes.together([&] {
              if (processes.index() == slow) std::this_thread::sleep_for(std::chrono::duration<double>(2.5 * timeout));
            });
            EXPECT_EQ(processes.from_first("still there"), "still there");
          },
          timeout);
      EXPECT_EQ(thrown, std::vector<std::string>(3)) << "process " << slow << " is slow";
    });
  }
  const auto thrown = run(
      2,
      [&](const Processes& processes) {
        if (processes.index() == 0) processes.together([] {});
      },
      timeout);
  for (std::thread& one : runs) one.join();
  EXPECT_NE(thrown[0].find("waited 1 s for the end of work"), std::string::npos) << thrown[0];
}

// Each name is reported by the first process that has it. A process may have a name twice.
TEST(Processes, DivideTheWrites) {
  const std::vector<std::vector<std::string>> names = {{"tied", "a", "tied"}, {}, {"b", "tied", "b"}, {"a", "b", "c"}};
  const std::vector<std::vector<bool>> expected = {{true, true, true}, {}, {true, false, true}, {false, false, true}};
  const auto thrown = run(4, [&](const Processes& processes) {
    EXPECT_EQ(processes.writes(names[processes.index()]), expected[processes.index()]);
  });
  EXPECT_EQ(thrown, std::vector<std::string>(4));
}

TEST(Processes, NoticeAnAbort) {
  const auto ends = make_in_process_transports(2, 0);
  const Processes processes(*ends[0], 20);
  processes.throw_if_aborted();
  ends[1]->abort("the other died");
  EXPECT_THROW(processes.throw_if_aborted(), Aborted);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
