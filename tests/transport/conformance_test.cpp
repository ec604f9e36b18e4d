// Tests the duties of every transport: messages match by tag in any order, sends never block, waits end (by a message,
// a time-out or an abort), and sums have the same bits on every rank.
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

#include <gtest/gtest.h>

#include "tests/transport/transports.h"
#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/transport/collectives.h"

namespace twobp::TWOBP_FILE {
namespace {

constexpr double kLong = 60;  // in seconds; a wait ends earlier, by the tested event

Tag forward(int stage, int micro_batch, int64_t step = 0) {
  return {step, stage, micro_batch, MessageKind::kForward};
}
Tag backward(int stage, int micro_batch, int64_t step = 0) {
  return {step, stage, micro_batch, MessageKind::kBackward};
}

at::Tensor filled(double value, at::IntArrayRef sizes = {3}) {
  return at::full(sizes, value, at::kFloat);
}

double first_of(const Values& values) {
  return values.at(0).view({-1})[0].item<double>();
}

void sleep_for(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

class Conformance : public test::OnEveryTransport {};

TEST_P(Conformance, KnowsItsRankAndSize) {
  run(5, [&](Transport& transport) {
    EXPECT_EQ(transport.size(), 5);
    at::Tensor seen = at::zeros({5}, at::kFloat);
    seen[transport.rank()] = 1;
    all_reduce_sum(transport, seen, kLong);
    EXPECT_TRUE(at::equal(seen, at::ones({5}, at::kFloat))) << "each rank once";
  });
}

TEST_P(Conformance, DeliversTheMessagesThatWereSent) {
  run(2, [](Transport& transport) {
    const at::Tensor floats = at::arange(12, at::kFloat).view({3, 4});
    const at::Tensor ids = at::arange(5, at::kLong);
    const at::Tensor transposed = at::arange(6, at::kDouble).view({2, 3}).t();
    if (transport.rank() == 0) {
      transport.isend(1, forward(1, 0), {floats, ids, transposed});
      transport.isend(1, forward(1, 1), {});
    } else {
      const Values values = transport.receive(0, forward(1, 0), kLong);
      ASSERT_EQ(values.size(), 3U);
      EXPECT_TRUE(at::equal(values[0], floats));
      EXPECT_EQ(values[1].scalar_type(), at::kLong);
      EXPECT_TRUE(at::equal(values[1], ids));
      EXPECT_EQ(values[2].scalar_type(), at::kDouble);
      EXPECT_TRUE(at::equal(values[2], transposed));
      EXPECT_TRUE(transport.receive(0, forward(1, 1), kLong).empty());
    }
  });
}

TEST_P(Conformance, MatchesByTagInAnyOrder) {
  run(2, [](Transport& transport) {
    // Each pair of tags differs in one part. The messages are sent in one order and received in the other.
    const std::vector<Tag> tags = {forward(1, 0),    forward(1, 1),  forward(2, 0),    backward(1, 0),
                                   forward(1, 0, 1), forward(-1, 0), forward(1, 0, -1)};
    const auto count = static_cast<int>(tags.size());
    if (transport.rank() == 0) {
      for (int i = 0; i < count; ++i) transport.isend(1, tags[i], {filled(i)});
    } else {
      for (int i = count - 1; i >= 0; --i) {
        EXPECT_EQ(first_of(transport.receive(0, tags[i], kLong)), i) << to_string(tags[i]);
      }
    }
  });
}

TEST_P(Conformance, KeepsTheOrderOfOneTag) {
  run(2, [](Transport& transport) {
    for (int i = 0; i < 100; ++i) {
      if (transport.rank() == 0) {
        transport.isend(1, forward(1, 0), {filled(i)});
      } else {
        EXPECT_EQ(first_of(transport.receive(0, forward(1, 0), kLong)), i);
      }
    }
  });
}

TEST_P(Conformance, TellsSendersApart) {
  run(4, [](Transport& transport) {
    if (transport.rank() > 0) {
      transport.isend(0, forward(0, 0), {filled(transport.rank())});
    } else {
      for (const int from : {2, 3, 1}) EXPECT_EQ(first_of(transport.receive(from, forward(0, 0), kLong)), from);
    }
  });
}

// Sends do not wait for the receiver. Each rank sends everything before it receives anything.
TEST_P(Conformance, KeepsManyMessagesInTransitInBothDirections) {
  run(2, [](Transport& transport) {
    constexpr int kMessages = 500;
    const int rank = transport.rank();
    const int other = 1 - rank;
    for (int i = 0; i < kMessages; ++i) {
      transport.isend(other, forward(other, i), {filled(1000 * rank + i, {64, 64})});
    }
    for (int i = 0; i < kMessages; ++i) {
      EXPECT_EQ(first_of(transport.receive(other, forward(rank, i), kLong)), 1000 * other + i);
    }
  });
}

// The message goes around a ring of more ranks than there are cores, several times.
TEST_P(Conformance, WorksWithMoreRanksThanCores) {
  const int ranks = 2 * static_cast<int>(std::thread::hardware_concurrency()) + 3;
  run(ranks, [&](Transport& transport) {
    const int rank = transport.rank();
    const int next = (rank + 1) % ranks;
    const int previous = (rank + ranks - 1) % ranks;
    constexpr int kRounds = 20;
    for (int round = 0; round < kRounds; ++round) {
      if (rank > 0 || round > 0) {
        EXPECT_EQ(first_of(transport.receive(previous, forward(rank, round), kLong)), round * ranks + rank);
      }
      const int to_round = next == 0 ? round + 1 : round;
      if (to_round < kRounds) transport.isend(next, forward(next, to_round), {filled(to_round * ranks + next)});
    }
  });
}

TEST_P(Conformance, SendsTensorsOfSizeZero) {
  run(2, [](Transport& transport) {
    if (transport.rank() == 0) {
      transport.isend(1, forward(1, 0), {at::empty({0, 7}, at::kFloat), filled(3), at::empty({4, 0}, at::kLong)});
    } else {
      const Values values = transport.receive(0, forward(1, 0), kLong);
      ASSERT_EQ(values.size(), 3U);
      EXPECT_EQ(values[0].sizes(), (at::IntArrayRef{0, 7}));
      EXPECT_EQ(values[1].numel(), 3);
      EXPECT_EQ(values[2].sizes(), (at::IntArrayRef{4, 0}));
      EXPECT_EQ(values[2].scalar_type(), at::kLong);
    }
  });
}

TEST_P(Conformance, ShapesMayDifferBetweenMessages) {
  run(2, [](Transport& transport) {
    for (int i = 0; i < 10; ++i) {
      if (transport.rank() == 0) {
        transport.isend(1, forward(1, i), {filled(i, {i + 1, 10 - i})});
      } else {
        EXPECT_EQ(transport.receive(0, forward(1, i), kLong)[0].sizes(), (at::IntArrayRef{i + 1, 10 - i}));
      }
    }
  });
}

Forms forms_of_tensors(const Values& values) {
  Forms forms;
  for (const at::Tensor& value : values) {
    forms.push_back({value.scalar_type(), value.sizes().vec(), value.strides().vec()});
  }
  return forms;
}

Values expected_values(int i) {
  const at::Tensor numbers = filled(i, {i % 2 == 0 ? 5 : 300, 40});
  if (i % 3 != 0) return {numbers};
  return {numbers.t(), at::full({i + 1}, i, at::kBFloat16)};  // two tensors, one with other strides
}

// The receiver lists them in the order in which they are sent, and those with a description between them. It asks for
// them in another one.
TEST_P(Conformance, ExpectedMessagesComeWithoutADescription) {
  run(2, [](Transport& transport) {
    constexpr int kMessages = 12;
    const auto tag = [](int64_t step, int i) { return i % 2 == 0 ? forward(3, i, step) : backward(3, i, step); };
    for (int64_t step = 0; step < 3; ++step) {
      if (transport.rank() == 0) {
        transport.isend(1, forward(7, 0, step), {filled(70)});
        for (int i = kMessages - 1; i >= 0; --i) {
          transport.isend_expected(1, tag(step, i), expected_values(i));
          if (i % 4 == 1) transport.isend(1, forward(7, i, step), {filled(i, {50, 50})});
        }
      } else {
        transport.expect(0, forward(7, 0, step), {});
        for (int i = kMessages - 1; i >= 0; --i) {
          const Forms forms = forms_of_tensors(expected_values(i));
          const bool has_memory = transport.expect(0, tag(step, i), forms);
          EXPECT_EQ(transport.expect(0, tag(step, i), forms), has_memory) << "once more";
          if (i % 4 == 1) transport.expect(0, forward(7, i, step), {});
        }
        for (int i = 0; i < kMessages; ++i) {
          const Values expected = expected_values(i);
          const Values values = transport.receive(0, tag(step, i), kLong);
          ASSERT_EQ(values.size(), expected.size());
          for (size_t v = 0; v < values.size(); ++v) {
            EXPECT_TRUE(at::equal(values[v], expected[v])) << i;
            EXPECT_EQ(values[v].strides(), expected[v].strides());
            EXPECT_EQ(values[v].scalar_type(), expected[v].scalar_type());
          }
          if (i % 4 != 1) continue;
          EXPECT_EQ(first_of(transport.receive(0, forward(7, i, step), kLong)), i);
        }
        EXPECT_EQ(first_of(transport.receive(0, forward(7, 0, step), kLong)), 70);
      }
    }
  });
}

// A wait for one ends as any other.
TEST_P(Conformance, AnExpectedMessageThatDoesNotComeTimesOut) {
  if (GetParam().device_waits) return;
  run(2, [](Transport& transport) {
    const Values values = expected_values(1);
    if (transport.rank() == 1) {
      transport.expect(0, forward(1, 0), forms_of_tensors(values));
      try {
        transport.receive(0, forward(1, 0), 0.1);
        ADD_FAILURE() << "nobody sent this";
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("the input of stage 1, micro-batch 0"), std::string::npos)
            << error.what();
      }
      transport.isend(0, backward(0, 0), {});
      EXPECT_TRUE(at::equal(transport.receive(0, forward(1, 0), kLong).at(0), values[0]));
    } else {
      transport.receive(1, backward(0, 0), kLong);
      transport.isend_expected(1, forward(1, 0), values);
    }
  });
}

TEST_P(Conformance, AnAbortEndsExpectedMessages) {
  if (GetParam().device_waits) return;
  run(2, [](Transport& transport) {
    if (transport.rank() == 0) {
      sleep_for(0.03);
      transport.abort("nothing more");
    } else {
      transport.expect(0, forward(1, 0), forms_of_tensors(expected_values(1)));
      EXPECT_THROW(transport.receive(0, forward(1, 0), kLong), Aborted);
    }
  });
}

// The ranks do not agree on what comes without a description. No rank waits for the time-out.
TEST_P(Conformance, ADescriptionWhereNoneIsDueIsTakenOrRefused) {
  run(2, [](Transport& transport) {
    if (transport.rank() == 0) {
      transport.isend(1, forward(1, 0), {filled(3, {100, 100})});
      try {
        transport.receive(1, backward(0, 0), kLong);
      } catch (const Aborted&) {
      }
    } else {
      try {
        const bool has_memory = transport.expect(0, forward(1, 0), forms_of_tensors({filled(3, {100, 100})}));
        EXPECT_EQ(first_of(transport.receive(0, forward(1, 0), kLong)), 3);
        EXPECT_TRUE(!has_memory || GetParam().device_waits) << "only the order tells NCCL's messages apart";
      } catch (const Aborted&) {
        throw;
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("sent a description of the input of stage 1, micro-batch 0"),
                  std::string::npos)
            << error.what();
        transport.abort(error.what());
        return;
      }
      transport.isend(0, backward(0, 0), {});
    }
  });
}

TEST_P(Conformance, SendsToItself) {
  run(1, [](Transport& transport) {
    transport.isend(0, forward(0, 0), {filled(4)});
    EXPECT_EQ(first_of(transport.receive(0, forward(0, 0), kLong)), 4);
  });
}

TEST_P(Conformance, TryReceiveDoesNotWait) {
  run(2, [](Transport& transport) {
    if (transport.rank() == 0) {
      Values values = {filled(-1)};
      EXPECT_FALSE(transport.try_receive(1, forward(0, 0), values));
      EXPECT_EQ(first_of(values), -1) << "a receive without a message must leave the values alone";
      transport.isend(1, forward(1, 0), {filled(1)});
      const double until = now_seconds() + kLong;
      bool there = false;
      while (!there && now_seconds() < until) {
        transport.progress();
        there = transport.try_receive(1, forward(0, 0), values);
      }
      ASSERT_TRUE(there);
      EXPECT_EQ(first_of(values), 2);
      EXPECT_FALSE(transport.try_receive(1, forward(0, 0), values)) << "a message is received once";
    } else {
      transport.receive(0, forward(1, 0), kLong);
      transport.isend(0, forward(0, 0), {filled(2)});
    }
  });
}

TEST_P(Conformance, ReceiveTimesOutWithAMessage) {
  run(2, [](Transport& transport) {
    if (transport.rank() != 1) return;
    const double begin = now_seconds();
    try {
      transport.receive(0, forward(1, 3, 7), 0.1);
      ADD_FAILURE() << "nobody sent this";
    } catch (const Error& error) {
      const std::string what = error.what();
      for (const char* part :
           {"rank 1", "0.1 s", "the input of stage 1, micro-batch 3, step 7", "rank 0", "time-out"}) {
        EXPECT_NE(what.find(part), std::string::npos) << "no \"" << part << "\" in: " << what;
      }
    }
    EXPECT_GE(now_seconds() - begin, 0.1);
    EXPECT_LT(now_seconds() - begin, 5);
  });
}

// A time-out ends one wait, not the transport.
TEST_P(Conformance, AMessageAfterATimeOutArrives) {
  run(2, [](Transport& transport) {
    if (transport.rank() == 0) {
      transport.receive(1, backward(0, 0), kLong);
      transport.isend(1, forward(1, 0), {filled(5)});
    } else {
      EXPECT_THROW(transport.receive(0, forward(1, 0), 0.02), Error);
      transport.isend(0, backward(0, 0), {});
      EXPECT_EQ(first_of(transport.receive(0, forward(1, 0), kLong)), 5);
    }
  });
}

TEST_P(Conformance, RefusesRanksThatDoNotExist) {
  run(2, [](Transport& transport) {
    EXPECT_THROW(transport.isend(2, forward(0, 0), {}), Error);
    EXPECT_THROW(transport.isend(-1, forward(0, 0), {}), Error);
  });
}

// An abort ends running and later waits on every rank, including the aborting one.
TEST_P(Conformance, AbortWakesEveryWait) {
  const double begin = now_seconds();
  run(4, [](Transport& transport) {
    const auto expect_aborted = [&](const std::function<void()>& wait) {
      try {
        wait();
        ADD_FAILURE() << "rank " << transport.rank() << " was not woken";
      } catch (const Aborted& aborted) {
        EXPECT_NE(std::string(aborted.what()).find("a good reason"), std::string::npos) << aborted.what();
      }
    };
    at::Tensor tensor = filled(1);
    switch (transport.rank()) {
      case 0:
        sleep_for(0.05);  // so that the others are waiting
        transport.abort("a good reason");
        transport.abort("another reason");  // the first reason stays
        break;
      case 1:
      case 2:
        expect_aborted([&] { transport.receive(0, forward(1, 0), kLong); });
        break;
      default:
        expect_aborted([&] { all_reduce_sum(transport, tensor, kLong); });
        break;
    }
    expect_aborted([&] { transport.receive(1, forward(1, 1), kLong); });
    expect_aborted([&] { all_reduce_sum(transport, tensor, kLong); });
    expect_aborted([&] {
      Values values;
      transport.try_receive(1, forward(1, 2), values);
    });
  });
  EXPECT_LT(now_seconds() - begin, 10) << "a time-out ended the waits, not the abort";
}

TEST_P(Conformance, AnAbortMayComeFromAnotherThread) {
  run(2, [](Transport& transport) {
    if (transport.rank() == 0) {
      std::thread([&] {
        sleep_for(0.03);
        transport.abort("from outside");
      }).join();
    } else {
      EXPECT_THROW(transport.receive(0, forward(1, 0), kLong), Aborted);
    }
  });
}

// Makes a rank's numbers. They have very unequal sizes, so that the order of the sum shows in the bits.
at::Tensor contribution(int rank, int round) {
  at::Tensor tensor = at::empty({33}, at::kFloat);
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    const double size = std::pow(10.0, static_cast<double>((7 * rank + i + round) % 9) - 4);
    tensor.mutable_data_ptr<float>()[i] = static_cast<float>(size * (1 + std::sin(static_cast<double>(rank * 31 + i))));
  }
  return tensor;
}

TEST_P(Conformance, AllReduceSumsInRankOrderOnEveryRank) {
  for (const int ranks : {1, 2, 3, 2 * static_cast<int>(std::thread::hardware_concurrency()) + 3}) {
    if (ranks > GetParam().most_ranks) continue;
    run(ranks, [&](Transport& transport) {
      for (int round = 0; round < 10; ++round) {
        at::Tensor expected = contribution(0, round);
        for (int r = 1; r < ranks; ++r) expected.add_(contribution(r, round));
        at::Tensor tensor = contribution(transport.rank(), round);
        if ((transport.rank() + round) % 3 == 0) sleep_for(0.001);  // ranks arrive in another order each time
        const void* memory = tensor.const_data_ptr();
        all_reduce_sum(transport, tensor, kLong);
        EXPECT_EQ(tensor.const_data_ptr(), memory) << "in place";
        EXPECT_EQ(std::memcmp(tensor.const_data_ptr(), expected.const_data_ptr(), expected.nbytes()), 0)
            << ranks << " ranks, round " << round;
      }
    });
  }
}

// As a sum over as many ranks as there are terms.
TEST_P(Conformance, AllReduceOfTermsSumsInTheOrderOfTheTerms) {
  constexpr int kTerms = 3;
  for (const int ranks : {1, 2, 3}) {
    run(ranks, [&](Transport& transport) {
      for (int round = 0; round < 10; ++round) {
        at::Tensor expected = contribution(0, round);
        for (int term = 1; term < kTerms * ranks; ++term) expected.add_(contribution(term, round));
        std::vector<at::Tensor> terms;
        for (int term = 0; term < kTerms; ++term)
          terms.push_back(contribution(kTerms * transport.rank() + term, round));
        const at::Tensor sums = at::stack(terms);
        AllReduceOfTerms sum(transport, sums, 1);
        wait_for(sum, kLong);
        EXPECT_EQ(std::memcmp(sums.const_data_ptr(), expected.const_data_ptr(), expected.nbytes()), 0)
            << ranks << " ranks, round " << round;
      }
    });
  }
}

TEST_P(Conformance, TheOrderOfTheSumShowsInTheBits) {
  at::Tensor up = contribution(0, 0);
  at::Tensor down = contribution(4, 0);
  for (int r = 1; r < 5; ++r) up.add_(contribution(r, 0));
  for (int r = 3; r >= 0; --r) down.add_(contribution(r, 0));
  EXPECT_FALSE(at::equal(up, down)) << "if the order did not matter, the test above would prove nothing";
}

TEST_P(Conformance, AllReduceTakesDoublesAndEmptyTensors) {
  run(3, [](Transport& transport) {
    at::Tensor doubles = at::full({2}, 0.1 * (transport.rank() + 1), at::kDouble);
    all_reduce_sum(transport, doubles, kLong);
    EXPECT_EQ(doubles[1].item<double>(), 0.1 * 1 + 0.1 * 2 + 0.1 * 3);
    at::Tensor nothing = at::empty({0}, at::kFloat);
    all_reduce_sum(transport, nothing, kLong);
    EXPECT_EQ(nothing.numel(), 0);
  });
}

TEST_P(Conformance, MessagesAndSumsDoNotMix) {
  run(3, [](Transport& transport) {
    const int next = (transport.rank() + 1) % 3;
    const int previous = (transport.rank() + 2) % 3;
    for (int i = 0; i < 50; ++i) {
      transport.isend(next, forward(next, i), {filled(i)});
      at::Tensor tensor = filled(i);
      all_reduce_sum(transport, tensor, kLong);
      EXPECT_EQ(tensor[0].item<double>(), 3 * i);
      EXPECT_EQ(first_of(transport.receive(previous, forward(transport.rank(), i), kLong)), i);
    }
  });
}

TEST_P(Conformance, SumTimesOutWithAMessage) {
  run(2, [](Transport& transport) {
    if (transport.rank() != 0) return;
    at::Tensor tensor = filled(1);
    try {
      all_reduce_sum(transport, tensor, 0.1);
      ADD_FAILURE() << "the other rank never came";
    } catch (const Error& error) {
      const std::string what = error.what();
      for (const char* part : {"rank 0 waited 0.", "collective", "from rank 1"}) {
        EXPECT_NE(what.find(part), std::string::npos) << "no \"" << part << "\" in: " << what;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, Conformance, ::testing::ValuesIn(test::worlds()), test::name_of_world);

}  // namespace
}  // namespace twobp::TWOBP_FILE
