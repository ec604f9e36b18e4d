// Tests processes that meet at a store: their arrival, missing ranks, errors, and messages through the store.
#include "twobp/transport/store/store_connection.h"

#include <algorithm>
#include <arpa/inet.h>
#include <atomic>
#include <barrier>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <netinet/in.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "tests/transport/device_transports.h"
#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/transport/collectives.h"
#include "twobp/transport/start.h"

namespace twobp::TWOBP_FILE {
namespace {

constexpr double kLong = 60;     // seconds
constexpr double kPatience = 6;  // until those that come have met, also on a busy machine
constexpr const char* kChild = "TWOBP_TEST_STORE_CHILD";

StorePlace place_at(int port, int rank, int size) {
  StorePlace place;
  place.address = "127.0.0.1";
  place.port = port;
  place.rank = rank;
  place.size = size;
  return place;
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

void expect_parts(const std::string& what, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(what.find(part), std::string::npos) << "no \"" << part << "\" in: " << what;
  }
  EXPECT_EQ(what.find('\n'), std::string::npos) << what;
}

// Connects all ranks at once and returns their messages.
std::vector<std::string> messages_of(const std::vector<StorePlace>& places, double timeout) {
  std::vector<std::string> messages(places.size());
  test::run_on_threads(static_cast<int>(places.size()), [&](int i) {
    messages[i] = message_of([&] { StoreConnection connection(places[i], timeout); });
  });
  return messages;
}

TEST(StoreConnection, AllArriveAndExchangeTexts) {
  const int port = test::free_port();
  test::run_on_threads(4, [&](int rank) {
    StoreConnection connection(place_at(port, rank, 4), kLong);
    EXPECT_EQ(connection.name(), concat("127.0.0.1:", port));
    connection.set(concat("word of ", rank), std::string("a\0b", 3) + std::to_string(rank));
    for (int other = 0; other < 4; ++other) {
      EXPECT_EQ(connection.get(concat("word of ", other), kLong), std::string("a\0b", 3) + std::to_string(other));
    }
    for (int i = 0; i < 50; ++i) connection.push(concat("for ", (rank + 1) % 4), std::to_string(i));
    const auto own = connection.connect();
    for (int i = 0; i < 50; ++i) EXPECT_EQ(own->pop(concat("for ", rank)), std::to_string(i));
  });
}

TEST(StoreConnection, ASingleProcessNeedsNoOther) {
  StoreConnection connection(place_at(0, 0, 1), kLong);
  EXPECT_GT(connection.place().port, 0) << "the system has picked one";
  expect_parts(message_of([&] { connection.get("nothing", 0.1); }),
               {"rank 0 waited 0.1 s", "'nothing', which no rank has set"});
  expect_parts(message_of([&] { connection.push("q", std::string(StoreConnection::kMostBytes + 1, 'x')); }),
               {"at most 4194304"});
}

TEST(StoreConnection, SaysThatThePortIsInUse) {
  StoreConnection first(place_at(0, 0, 1), kLong);
  expect_parts(message_of([&] { StoreConnection second(place_at(first.place().port, 0, 1), kLong); }),
               {concat("port ", first.place().port), "in use", "set MASTER_PORT"});
}

TEST(StoreConnection, ReportsThatTheServerDoesNotAnswer) {
  const int port = test::free_port();
  const double begin = now_seconds();
  expect_parts(message_of([&] { StoreConnection connection(place_at(port, 1, 2), 1); }),
               {concat("rank 1 got no answer from 127.0.0.1:", port), "MASTER_ADDR"});
  EXPECT_LT(now_seconds() - begin, 10);
}

TEST(StoreConnection, NamesTheMissingRanks) {
  const int port = test::free_port();
  for (const std::string& what : messages_of({place_at(port, 0, 4), place_at(port, 2, 4)}, kPatience)) {
    expect_parts(what, {"ranks 1, 3 of 4 did not connect", std::to_string(port)});
  }
}

TEST(StoreConnection, NamesUnequalSizes) {
  const int port = test::free_port();
  const double begin = now_seconds();
  for (const std::string& what : messages_of({place_at(port, 0, 2), place_at(port, 1, 3)}, kLong)) {
    expect_parts(what, {"unequal sizes", "rank 0", "rank 1", "as one of 2", "as one of 3"});
  }
  EXPECT_LT(now_seconds() - begin, 10) << "nobody waits for the time-out";
}

TEST(StoreConnection, NamesARankThatComesTwice) {
  const int port = test::free_port();
  for (const std::string& what :
       messages_of({place_at(port, 0, 3), place_at(port, 1, 3), place_at(port, 1, 3)}, kLong)) {
    expect_parts(what, {"two processes", "they are rank 1", "MASTER_PORT"});
  }
}

TEST(StoreConnection, NamesFewOfManyMissingRanks) {
  const int port = test::free_port();
  for (const std::string& what : messages_of({place_at(port, 0, 100), place_at(port, 3, 100)}, kPatience)) {
    expect_parts(what, {"ranks 1, 2, 4, 5, 6, 7, 8, 9 and 90 more of 100 did not connect"});
  }
}

// A rank does not ask for each of the others, and does not poll.
TEST(StoreConnection, ARankAsksLittleOfTheStore) {
  constexpr int kRanks = 48;
  const int port = test::free_port();
  std::vector<int64_t> requests(kRanks);
  test::run_on_threads(kRanks, [&](int rank) {
    const StoreConnection connection(place_at(port, rank, kRanks), kLong);
    requests[rank] = connection.requests();
  });
  EXPECT_LE(*std::max_element(requests.begin(), requests.end()), 10);
}

TEST(StoreConnection, SaysThatTheStoreIsGone) {
  const int port = test::free_port();
  std::unique_ptr<StoreConnection> host, guest;
  test::run_on_threads(2, [&](int rank) {
    (rank == 0 ? host : guest) = std::make_unique<StoreConnection>(place_at(port, rank, 2), kLong);
  });
  host->leave_within(0);
  host.reset();
  expect_parts(message_of([&] { guest->get("a", kLong); }),
               {concat("the store at 127.0.0.1:", port), "does not answer any more"});
}

// A stranger asks and does not wait for the answers. Without a handler, the signal would end this process.
TEST(StoreConnection, AStrangerWhoClosesEarlyEndsNothing) {
  const int port = test::free_port();
  const auto before = std::signal(SIGPIPE, SIG_DFL);
  StoreConnection connection(place_at(port, 0, 1), kLong);
  const std::string ask = std::string("\x00\xce\xf7\x85\x3c", 5) + std::string(20000, '\x07');  // hello; how many keys?
  for (int i = 0; i < 20; ++i) {
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ASSERT_EQ(::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_GT(::send(fd, ask.data(), ask.size(), MSG_NOSIGNAL), 0);
    ::close(fd);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the server answers
  connection.set("a", "b");
  EXPECT_EQ(connection.get("a", kLong), "b");
  std::signal(SIGPIPE, before);
}

// A reason that rank 0 leaves in the store is read by a busy process, too.
TEST(StoreConnection, StaysForWhoReadsLate) {
  const int port = test::free_port();
  std::unique_ptr<StoreConnection> host, guest;
  test::run_on_threads(2, [&](int rank) {
    (rank == 0 ? host : guest) = std::make_unique<StoreConnection>(place_at(port, rank, 2), kLong);
  });
  host->set("reason", "no memory");
  host->leave_within(30);
  std::thread leaves([&] { host.reset(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_EQ(guest->get("reason", kLong), "no memory");
  guest.reset();
  leaves.join();
}

TEST(StorePlace, FollowsTheLauncher) {
  Launcher launcher;
  launcher.kind = Launcher::Kind::kTorchrun;
  launcher.rank = 2;
  launcher.size = 5;
  expect_parts(message_of([&] { store_place(launcher); }), {"rank 2", "MASTER_ADDR", "torchrun"});
  launcher.master_address = "node7";
  EXPECT_EQ(store_place(launcher).port, 29500);
  launcher.master_port = 1234;
  const StorePlace place = store_place(launcher);
  EXPECT_EQ(place.address, "node7");
  EXPECT_EQ(place.port, 1234);
  EXPECT_EQ(place.rank, 2);
  EXPECT_EQ(place.size, 5);
}

// When a rank falls silent, all that wait for it fail at the same time. One of them is the first for all.
TEST(StoreTransport, RanksThatFailTogetherAgreeOnTheFirst) {
  for (int round = 0; round < 5; ++round) {
    std::vector<std::string> reasons(4);
    std::vector<int> firsts(4);
    std::barrier together(4);  // not of the transport, which the first abort would end
    test::run_on_store(4, [&](std::shared_ptr<Transport> transport) {
      const int rank = transport->rank();
      EXPECT_FALSE(transport->first_failure().has_value());
      together.arrive_and_wait();
      if (rank < 3) transport->abort(concat("reason of ", rank));  // the last one only hears of it
      const std::string aborted = [&] {
        try {
          transport->receive((rank + 1) % 4, {.step = 1}, kLong);
        } catch (const Aborted& error) {
          return std::string(error.what());
        }
        return std::string("no abort");
      }();
      const auto first = transport->first_failure();
      ASSERT_TRUE(first.has_value());
      firsts[rank] = first->rank;
      reasons[rank] = first->reason;
      expect_parts(aborted, {concat("rank ", rank, " stopped: ", first->reason)});
    });
    EXPECT_LT(firsts[0], 3);
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(firsts[rank], firsts[0]) << rank;
      EXPECT_EQ(reasons[rank], concat("reason of ", firsts[0])) << rank;
    }
  }
}

// So one process of a run has an error to report. The others are aborted by it.
TEST(StoreTransport, OneOfTheProcessesThatFailTogetherReports) {
  std::atomic<int> reports = 0;
  std::atomic<int> aborted = 0;
  test::run_on_store(4, [&](std::shared_ptr<Transport> transport) {
    std::vector<World> worlds;
    worlds.push_back(make_process_world(std::move(transport), 2, 2));
    try {
      run_worlds(std::move(worlds), [&](World world) {
        barrier(*world.processes, kLong);
        fail("process ", world.process(), " fails");
      });
    } catch (const Aborted& error) {
      ++aborted;
      expect_parts(error.what(), {" stopped: process ", " fails"});
    } catch (const Error&) {
      ++reports;
    }
  });
  EXPECT_EQ(reports, 1);
  EXPECT_EQ(aborted, 3);
}

// A message is larger than a value of the store. It is sent in parts, between others.
TEST(StoreTransport, SendsBigMessages) {
  test::run_on_store(2, [](std::shared_ptr<Transport> transport) {
    const at::Tensor big = at::arange(5 << 20, at::kInt);  // 20 MiB
    const Tag tag{1, 1, 0, MessageKind::kForward};
    if (transport->rank() == 0) {
      for (int i = 0; i < 3; ++i) transport->isend(1, tag, {big, at::full({1}, i)});
    } else {
      for (int i = 0; i < 3; ++i) {
        const Values values = transport->receive(0, tag, kLong);
        EXPECT_TRUE(at::equal(values.at(0), big));
        EXPECT_EQ(values.at(1).item<float>(), static_cast<float>(i));
      }
    }
    barrier(*transport, kLong);
  });
}

// A stranger does not know the run's id. If it writes under the keys of a run without an id, no rank reads them.
TEST(StoreTransport, IgnoresKeysThatCanBeGuessed) {
  test::run_on_store(2, [](std::shared_ptr<Transport> transport) { barrier(*transport, kLong); });
  const int port = test::free_port();
  test::run_on_threads(2, [&](int rank) {
    auto connection = std::make_shared<StoreConnection>(place_at(port, rank, 2), kLong);
    const auto transport = make_store_transport(connection);
    barrier(*transport, kLong);
    if (rank == 1) {
      c10d::TCPStoreOptions options;
      options.port = static_cast<uint16_t>(port);
      options.waitWorkers = false;
      c10d::TCPStore stranger("127.0.0.1", options);
      EXPECT_FALSE(stranger.check({"twobp/1/came/0"}));
      EXPECT_FALSE(stranger.check({"twobp/1/size"}));
      const std::vector<uint8_t> abort = {1, 0, 0, 0, 2, 0, 0, 0, 'x'};  // an abort from rank 1
      stranger.queuePush("twobp/1/queue/to/0", abort);
      stranger.set("twobp/1/end", std::vector<uint8_t>{'x'});
    }
    barrier(*transport, kLong);
  });
}

// A broken program or a stranger may send parts of messages that never end.
TEST(StoreTransport, AssemblesNoMoreThanItsLimit) {
  const int port = test::free_port();
  test::run_on_threads(2, [&](int rank) {
    auto connection = std::make_shared<StoreConnection>(place_at(port, rank, 2), kLong);
    if (rank == 0) {
      std::string part(1 << 20, 'x');
      part.replace(0, 8, std::string("\0\0\0\0\0\0\0\0", 8));  // from rank 0, with more to follow
      for (int i = 0; i < 6; ++i) connection->push("to/1", part);
      connection->get("seen", kLong);
      return;
    }
    const auto transport = make_store_transport(connection, /*most_unfinished=*/4 << 20);
    try {
      transport->receive(0, {}, kLong);
      ADD_FAILURE() << "nobody sent a whole message";
    } catch (const Aborted& aborted) {
      expect_parts(aborted.what(), {"rank 1 stopped", "more than 4.0 MiB of messages without an end", "rank 0"});
    }
    connection->set("seen", "");
  });
}

// If MASTER_ADDR is the address of one interface, no process can connect through another.
TEST(StoreConnection, ListensAtTheInterfaceOfItsAddress) {
  StoreConnection connection(place_at(0, 0, 1), kLong);
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in other{};
  other.sin_family = AF_INET;
  other.sin_port = htons(static_cast<uint16_t>(connection.place().port));
  other.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1);  // 127.0.0.2
  EXPECT_NE(::connect(fd, reinterpret_cast<sockaddr*>(&other), sizeof(other)), 0);
  ::close(fd);
}

TEST(StoreTransport, TheEndOfTheStoreEndsWaits) {
  const int port = test::free_port();
  test::run_on_threads(2, [&](int rank) {
    auto connection = std::make_shared<StoreConnection>(place_at(port, rank, 2), kLong);
    auto transport = make_store_transport(connection);
    if (rank == 0) {
      barrier(*transport, kLong);  // the other rank listens by now
      connection->leave_within(0);
      return;
    }
    try {
      barrier(*transport, kLong);  // the end of the barrier may be lost with the store
      transport->receive(0, {}, kLong);
      ADD_FAILURE() << "nobody sent this";
    } catch (const Aborted& aborted) {
      EXPECT_NE(std::string(aborted.what()).find("does not answer any more"), std::string::npos) << aborted.what();
    }
  });
}

// Each process of the tests below runs this. It reads the launcher's environment, meets the others, sums, and reports
// its result.
TEST(StoreProcess, Child) {
  if (!std::getenv(kChild)) GTEST_SKIP() << "run by the tests of processes";
  const Launcher launcher = find_launcher();
  ASSERT_EQ(launcher.kind, Launcher::Kind::kTorchrun);
  auto connection = std::make_shared<StoreConnection>(store_place(launcher), kLong);
  const auto transport = make_store_transport(connection);
  at::Tensor sum = at::full({100}, launcher.rank + 1.0);
  all_reduce_sum(*transport, sum, kLong);
  EXPECT_EQ(sum[99].item<double>(), launcher.size * (launcher.size + 1) / 2.0);
  barrier(*transport, kLong);
  // A child that skips this test or runs no test also gives exit code 0, so it leaves a file instead.
  if (!HasFailure()) std::ofstream(std::filesystem::path(std::getenv(kChild)) / std::to_string(launcher.rank));
}

// Each child leaves a file here. Its name is the child's rank.
class Marks {
 public:
  Marks() {
    std::string name = (std::filesystem::temp_directory_path() / "twobp-XXXXXX").string();
    EXPECT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  ~Marks() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  std::string folder() const { return folder_.string(); }
  std::vector<std::string> all() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_))
      names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  }

 private:
  std::filesystem::path folder_;
};

std::string own_path() {
  char path[4096];
  const ssize_t length = ::readlink("/proc/self/exe", path, sizeof(path));
  return {path, static_cast<size_t>(std::max<ssize_t>(length, 0))};
}

int exit_code(const std::string& command) {
  const int status = std::system(command.c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(StoreProcess, OfTheirOwnMeet) {
  const int port = test::free_port();
  const Marks marks;
  std::string start, end;
  for (int rank = 0; rank < 3; ++rank) {
    start += concat("env ", kChild, "='", marks.folder(), "' RANK=", rank, " WORLD_SIZE=3 LOCAL_RANK=", rank,
                    " MASTER_ADDR=localhost MASTER_PORT=", port, " '", own_path(),
                    "' --gtest_filter=StoreProcess.Child >/dev/null & p", rank, "=$!; ");
    end += concat("wait $p", rank, " || code=1; ");
  }
  EXPECT_EQ(exit_code(concat(start, "code=0; ", end, "exit $code")), 0);
  EXPECT_EQ(marks.all(), (std::vector<std::string>{"0", "1", "2"}));
}

// The process of the test below runs this. It hosts the store until it is killed.
TEST(StoreProcess, HostingChild) {
  if (!std::getenv(kChild)) GTEST_SKIP() << "run by the tests of processes";
  auto connection = std::make_shared<StoreConnection>(store_place(find_launcher()), kLong);
  const auto transport = make_store_transport(connection);
  barrier(*transport, kLong);
  ::alarm(static_cast<unsigned>(kLong));
  ::pause();
}

// The stopped host sends nothing, not even the end of the connection.
TEST(StoreProcess, AStoppedHostDoesNotDelayOthers) {
  const int port = test::free_port();
  std::vector<std::string> command = {"env",
                                      concat(kChild, "=1"),
                                      "RANK=0",
                                      "WORLD_SIZE=2",
                                      "LOCAL_RANK=0",
                                      "MASTER_ADDR=127.0.0.1",
                                      concat("MASTER_PORT=", port),
                                      own_path(),
                                      "--gtest_filter=StoreProcess.HostingChild"};
  std::vector<char*> arguments;
  for (std::string& argument : command) arguments.push_back(argument.data());
  arguments.push_back(nullptr);
  pid_t child = 0;
  ASSERT_EQ(::posix_spawnp(&child, "env", nullptr, nullptr, arguments.data(), environ), 0);
  auto transport = make_store_transport(std::make_shared<StoreConnection>(place_at(port, 1, 2), kLong));
  barrier(*transport, kLong);
  ::kill(child, SIGSTOP);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, WUNTRACED), child);
  EXPECT_TRUE(WIFSTOPPED(status));
  transport.reset();  // this ends although the listener gets no answer
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

TEST(StoreProcess, StartedByTorchrunMeet) {
  const char* python = std::getenv("TWOBP_PYTHON");
  const std::string interpreter = python ? python : "python3";
  if (exit_code(interpreter + " -c 'import sys, importlib.util as u; sys.exit(not u.find_spec(\"torch\"))'") != 0)
    GTEST_SKIP() << interpreter << " has no PyTorch";
  const Marks marks;
  EXPECT_EQ(exit_code(concat("env ", kChild, "='", marks.folder(), "' ", interpreter,
                             " -m torch.distributed.run --no-python --nproc-per-node 3 --master-port ",
                             test::free_port(), " '", own_path(), "' --gtest_filter=StoreProcess.Child >/dev/null")),
            0);
  EXPECT_EQ(marks.all(), (std::vector<std::string>{"0", "1", "2"}));
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
