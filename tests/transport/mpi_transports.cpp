// Runs ranks as processes that mpirun started, with whole messages and with small chunks. The program's main starts MPI
// and lets each process show its own failures.
#include <exception>
#include <iostream>
#include <mpi.h>

#include "tests/transport/transports.h"
#include "twobp/transport/mpi/mpi.h"

namespace twobp::test {
namespace {

// Every test has a network of its own, since an abort is final.
void run_on_processes(int ranks, const MpiOptions& options, const RankBody& body) {
  if (ranks > mpi_size()) {
    GTEST_SKIP() << "needs " << ranks << " processes, there are " << mpi_size();
  }
  const std::unique_ptr<Transport> end = make_mpi_transport(ranks, options);
  std::exception_ptr error;
  if (end) {
    try {
      body(*end);
    } catch (...) {
      error = std::current_exception();
      end->abort("another rank of the test failed");
    }
  }
  // All processes arrive here before they start the next test together.
  MPI_Barrier(MPI_COMM_WORLD);
  if (error) std::rethrow_exception(error);
}

// The first process shows all output. The others show only their failures.
class Failures : public ::testing::EmptyTestEventListener {
 public:
  explicit Failures(int rank) : rank_(rank) {}

  void OnTestStart(const ::testing::TestInfo& test) override { test_ = test.name(); }
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::cout << "process " << rank_ << ": " << test_ << ": "
              << (result.file_name() != nullptr ? result.file_name() : "") << ":" << result.line_number() << ": "
              << result.message() << std::endl;
  }

 private:
  int rank_;
  std::string test_;
};

}  // namespace

std::vector<World> worlds() {
  const auto with = [](const MpiOptions& options) {
    return [options](int ranks, const RankBody& body) { run_on_processes(ranks, options, body); };
  };
  return {{"Mpi", with({}), mpi_size()},
          {"MpiSmallChunks", with({.spin_seconds = 0, .chunk_bytes = 100003}), mpi_size()}};
}

}  // namespace twobp::test

int main(int count, char** values) {
  ::testing::InitGoogleTest(&count, values);
  twobp::mpi_size();
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
  if (rank > 0) {
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new twobp::test::Failures(rank));
  }
  const int result = RUN_ALL_TESTS();
  // The library does not finalize MPI itself, because tests of abort look like failed runs.
  MPI_Finalize();
  return result;
}
