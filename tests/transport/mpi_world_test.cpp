// Tests a run's processes as mpirun starts them: their ranks, groups that do not mix, and wrong numbers of processes.
#include <mpi.h>

#include <gtest/gtest.h>

#include "tests/expect_error.h"
#include "twobp/core/measure.h"
#include "twobp/transport/collectives.h"
#include "twobp/transport/mpi/mpi.h"
#include "twobp/transport/start.h"

namespace twobp::TWOBP_FILE {
namespace {

constexpr double kLong = 60;  // seconds

TEST(Launcher, AgreesWithMpi) {
  const Launcher launcher = find_launcher();
  EXPECT_EQ(launcher.kind, Launcher::Kind::kMpi);
  EXPECT_EQ(launcher.size, mpi_size());
  EXPECT_EQ(launcher.local_rank, launcher.rank) << "one machine";
}

TEST(MpiWorld, EachProcessIsOneRank) {
  ASSERT_TRUE(has_mpi());
  const int size = mpi_size();
  for (int replicas = 1; replicas <= size; ++replicas) {
    if (size % replicas != 0) continue;
    const int ranks = size / replicas;
    const World world = make_mpi_world(replicas, ranks);
    const int process = find_launcher().rank;
    EXPECT_EQ(world.process(), process);
    EXPECT_EQ(world.process_count(), size);
    EXPECT_EQ(world.replica, process / ranks);
    const int here = process % ranks;
    for (int rank = 0; rank < ranks; ++rank) EXPECT_EQ(world.is_local(rank), rank == here);
    Transport& pipeline = *world.pipeline[here];
    Transport& data = *world.data[here];
    EXPECT_EQ(pipeline.rank(), here);
    EXPECT_EQ(pipeline.size(), ranks);
    EXPECT_EQ(data.rank(), world.replica);
    EXPECT_EQ(data.size(), replicas);
    // Each of the three groups sums the same number at the same time.
    at::Tensor in_pipeline = at::full({1}, process), in_data = in_pipeline.clone(), of_all = in_data.clone();
    AllReduce one(pipeline, in_pipeline, 1), two(data, in_data, 1), three(*world.processes, of_all, 1);
    wait_for(three, kLong);
    wait_for(two, kLong);
    wait_for(one, kLong);
    EXPECT_EQ(in_pipeline.item<int>(), ranks * world.replica * ranks + ranks * (ranks - 1) / 2);
    EXPECT_EQ(in_data.item<int>(), replicas * here + ranks * replicas * (replicas - 1) / 2);
    EXPECT_EQ(of_all.item<int>(), size * (size - 1) / 2);
    barrier(*world.processes, kLong);
  }
}

TEST(MpiWorld, AbortReachesEveryGroupAndProcess) {
  const int size = mpi_size();
  const World world = make_mpi_world(1, size);
  const int here = world.process();
  if (here == size - 1) {
    world.pipeline[here]->abort("the last one had enough");
  }
  const double begin = now_seconds();
  try {
    world.processes->receive((here + 1) % size, {}, kLong);
    ADD_FAILURE() << "nobody sent this";
  } catch (const Aborted& aborted) {
    EXPECT_NE(std::string(aborted.what()).find("the last one had enough"), std::string::npos);
  }
  EXPECT_LT(now_seconds() - begin, 10);
  EXPECT_THROW(world.pipeline[here]->receive((here + 1) % size, {}, kLong), Aborted);
}

TEST(MpiWorld, RefusesAWrongNumberOfProcesses) {
  const int size = mpi_size();
  test::expect_error([&] { make_mpi_world(1, size + 1); },
                     {std::to_string(size + 1) + " ranks", std::to_string(size) + " process", "mpirun -n"});
  test::expect_error([&] { make_mpi_world(size + 1, 1); }, {"pipeline.data_parallel"});
  test::expect_error([&] { make_mpi_world(0, 1); }, {"0 replicas of 1 ranks"});
}

// The receiver does not look until the sender has given up. So a large message does not leave, and the sender says so.
TEST(MpiTransport, FlushTimesOutWithAMessage) {
  const auto end = make_mpi_transport(2);
  if (end && end->rank() == 0) {
    end->isend(1, {}, {at::ones({4 << 20})});
    test::expect_error([&] { end->flush(0.1); }, {"rank 0 waited 0.1 s", "rank 1", "time-out"});
  }
  MPI_Barrier(MPI_COMM_WORLD);
  if (!end) return;
  if (end->rank() == 0) {
    end->isend(1, {.step = 1}, {});
    end->flush(kLong);
  } else {
    EXPECT_EQ(end->receive(0, {}, kLong).at(0).numel(), 4 << 20);
    EXPECT_TRUE(end->receive(0, {.step = 1}, kLong).empty());
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
