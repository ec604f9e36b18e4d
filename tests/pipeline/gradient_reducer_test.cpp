// Tests sums of gradients over replicas. Layers may finish in any order, on any number of replicas. The sums always
// follow the order of the replicas, and the sequence of collectives is the same.
#include "twobp/pipeline/gradient_reducer.h"

#include <algorithm>
#include <barrier>
#include <random>
#include <set>
#include <thread>

#include "tests/pipeline/support.h"
#include "twobp/transport/world.h"

namespace twobp::test {
namespace {

constexpr double kTimeout = 30;

// Records the numbers of the sums that its rank starts. The first part of each sum that it sends tells the number.
class Recording : public Transport {
 public:
  explicit Recording(Transport& inner) : inner_(inner) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  void isend(int to, const Tag& tag, Values values) override {
    const int number = tag.micro_batch - 1;  // counted from 1
    if (tag.kind == MessageKind::kPart && (started.empty() || started.back() != number)) started.push_back(number);
    inner_.isend(to, tag, std::move(values));
  }
  bool try_receive(int from, const Tag& tag, Values& values) override { return inner_.try_receive(from, tag, values); }
  Values receive(int from, const Tag& tag, double timeout) override { return inner_.receive(from, tag, timeout); }
  void abort(const std::string& reason) override { inner_.abort(reason); }

  std::vector<int> started;

 private:
  Transport& inner_;
};

struct Shape {
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
  int stage;
  int layer;
};

// The parameters of one replica.
struct Replica {
  explicit Replica(const std::vector<Shape>& shapes) {
    for (size_t i = 0; i < shapes.size(); ++i) {
      const Shape& shape = shapes[i];
      const std::string name = concat("p", i);
      parameters.push_back(std::make_unique<Parameter>(std::vector<ParameterPart>{{name, shape.sizes[0]}}, shape.sizes,
                                                       shape.dtype, 0.0));
      if (shape.sizes.size() == 4) parameters.back()->store_channels_last();
      parameters.back()->allocate_value(1);
      parameters.back()->allocate_grad();
      items.push_back({parameters.back().get(), shape.stage, shape.layer, concat("layer ", shape.layer)});
    }
  }

  std::vector<std::unique_ptr<Parameter>> parameters;
  std::vector<GradientReducer::Item> items;
};

// Runs body(replica, transport) on one thread per replica. Rethrows the first exception.
void on_replicas(int replicas, const std::function<void(int, Transport&)>& body) {
  std::vector<World> worlds = make_in_process_worlds(replicas, 1, 0);
  std::vector<std::exception_ptr> errors(replicas);
  std::vector<std::thread> threads;
  for (int r = 0; r < replicas; ++r) {
    threads.emplace_back([&, r] {
      try {
        body(r, *worlds[r].data[0]);
      } catch (const std::exception& error) {
        errors[r] = std::current_exception();
        worlds[r].data[0]->abort(error.what());
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

std::vector<Shape> random_shapes(std::mt19937& random) {
  std::vector<Shape> shapes;
  const int stages = 1 + static_cast<int>(random() % 2);
  for (int stage = 0; stage < stages; ++stage) {
    const int layers = 1 + static_cast<int>(random() % 5);
    for (int layer = 0; layer < layers; ++layer) {
      for (int count = static_cast<int>(random() % 4); count > 0; --count) {
        const int64_t rows = 1 + static_cast<int64_t>(random() % 70);
        Shape shape{{rows}, at::kFloat, 2 * stage, layer};
        if (random() % 2 == 0) shape.sizes.push_back(1 + static_cast<int64_t>(random() % 90));
        if (random() % 8 == 0) shape.sizes = {rows, 3, 2, 2};
        if (random() % 8 == 0) shape.dtype = at::kDouble;
        if (random() % 8 == 0) shape.dtype = at::kBFloat16;  // the gradients are float
        shapes.push_back(shape);
      }
    }
  }
  return shapes;
}

TEST(GradientReducer, SumsAndTheirSequenceDoNotDependOnTheOrderOfLayers) {
  for (uint32_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const int replicas = 2 + static_cast<int>(random() % 3);
    const std::vector<Shape> shapes = random_shapes(random);
    const int64_t bucket_bytes = 1 + static_cast<int64_t>(random() % 40000);
    const int steps = 2;
    // The gradients are listed by step, replica and parameter. An undefined tensor means that there is no gradient.
    std::vector<std::vector<std::vector<at::Tensor>>> gradients(steps);
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    for (auto& step : gradients) {
      step.resize(replicas);
      for (auto& replica : step) {
        for (const Shape& shape : shapes) {
          const auto type = shape.dtype == at::kDouble ? at::kDouble : at::kFloat;
          replica.push_back(random() % 6 == 0 ? at::Tensor() : at::randn(shape.sizes, generator, type));
        }
      }
    }
    std::vector<std::vector<int>> started(replicas);
    std::vector<size_t> buckets(replicas);
    // The sums of all replicas are listed by step and parameter.
    std::vector<std::vector<std::vector<at::Tensor>>> sums(replicas, std::vector<std::vector<at::Tensor>>(steps));
    on_replicas(replicas, [&](int r, Transport& transport) {
      std::mt19937 own(seed * 100 + r);
      Replica replica(shapes);
      Recording recording(transport);
      GradientReducer reducer(recording, replica.items, bucket_bytes);
      buckets[r] = reducer.buckets().size();
      std::set<std::pair<int, int>> layers;
      for (const Shape& shape : shapes) layers.insert({shape.stage, shape.layer});
      std::vector<std::pair<int, int>> order(layers.begin(), layers.end());
      for (int step = 0; step < steps; ++step) {
        reducer.start();
        std::shuffle(order.begin(), order.end(), own);
        for (const auto& [stage, layer] : order) {
          for (size_t p = 0; p < shapes.size(); ++p) {
            const bool here = shapes[p].stage == stage && shapes[p].layer == layer;
            if (here && gradients[step][r][p].defined()) replica.parameters[p]->accumulate(gradients[step][r][p]);
          }
          if (own() % 10 != 0) reducer.layer_done(stage, layer);  // finish() handles the other layers
          if (own() % 3 == 0) reducer.progress();
          if (own() % 7 == 0) std::this_thread::yield();
        }
        reducer.finish(kTimeout);
        EXPECT_FALSE(reducer.busy());
        for (auto& parameter : replica.parameters) {
          EXPECT_TRUE(parameter->has_grad());
          sums[r][step].push_back(parameter->grad.clone());
          parameter->forget_grad();
        }
      }
      started[r] = recording.started;
    });
    for (int r = 0; r < replicas; ++r) {
      std::vector<int> expected;
      for (int step = 0; step < steps; ++step) {
        for (size_t b = 0; b < buckets[r]; ++b) expected.push_back(static_cast<int>(b));
      }
      if (buckets[r] == 1) expected.resize(1);  // the recording cannot tell its two steps apart
      EXPECT_EQ(started[r], expected) << "replica " << r;
      for (int step = 0; step < steps; ++step) {
        std::vector<at::Tensor> expected_sums;
        for (size_t p = 0; p < shapes.size(); ++p) {
          at::Tensor sum;
          for (int from = 0; from < replicas; ++from) {
            const at::Tensor& given = gradients[step][from][p];
            const at::Tensor part = given.defined() ? given : at::zeros_like(sums[r][step][p]);
            sum = sum.defined() ? sum + part : part;
          }
          expected_sums.push_back(at::empty_like(sums[r][step][p]).copy_(sum));
        }
        expect_same_bits(expected_sums, sums[r][step]);
      }
    }
  }
}

// Makes three layers of two parameters each, of 400 and 4000 bytes.
std::vector<Shape> three_layers() {
  std::vector<Shape> shapes;
  for (int layer = 0; layer < 3; ++layer) {
    shapes.push_back({{100}, at::kFloat, 0, layer});
    shapes.push_back({{10, 100}, at::kFloat, 0, layer});
  }
  return shapes;
}

TEST(GradientReducer, CutsBucketsFromTheLastLayerOnWhereTheyAreFull) {
  on_replicas(2, [&](int, Transport& transport) {
    const auto names = [&](int64_t bucket_bytes) {
      Replica replica(three_layers());
      GradientReducer reducer(transport, replica.items, bucket_bytes);
      std::vector<std::vector<std::string>> all;
      for (const auto& bucket : reducer.buckets()) {
        all.emplace_back();
        for (const auto& item : bucket.items) all.back().push_back(item.parameter->name());
      }
      return all;
    };
    using Names = std::vector<std::vector<std::string>>;
    EXPECT_EQ(names(1), (Names{{"p5"}, {"p4"}, {"p3"}, {"p2"}, {"p1"}, {"p0"}}));
    EXPECT_EQ(names(4001), (Names{{"p5", "p4"}, {"p3", "p2"}, {"p1", "p0"}}));
    EXPECT_EQ(names(4401), (Names{{"p5", "p4", "p3"}, {"p2", "p1", "p0"}}));
    EXPECT_EQ(names(1 << 20), (Names{{"p5", "p4", "p3", "p2", "p1", "p0"}}));
  });
}

TEST(GradientReducer, StartsABucketAfterItsLayersAndTheBucketsBeforeIt) {
  on_replicas(2, [&](int, Transport& transport) {
    Replica replica(three_layers());
    GradientReducer reducer(transport, replica.items, 4001);
    reducer.layer_done(0, 1);
    EXPECT_EQ(reducer.started(), 0u);  // the buckets before it have not started
    reducer.layer_done(0, 2);
    EXPECT_EQ(reducer.started(), 2u);
    reducer.layer_done(0, 0);
    EXPECT_EQ(reducer.started(), 3u);
    reducer.finish(kTimeout);
    reducer.start();
    EXPECT_EQ(reducer.started(), 0u);
  });
}

TEST(GradientReducer, AlignsGradientsInABucketLikeSeparateTensors) {
  on_replicas(2, [&](int, Transport& transport) {
    std::vector<Shape> shapes = three_layers();
    shapes.push_back({{3, 5, 2, 2}, at::kFloat, 0, 2});
    Replica replica(shapes);
    const std::vector<int64_t> strides = replica.parameters.back()->grad.strides().vec();
    GradientReducer reducer(transport, replica.items, 1 << 20);
    ASSERT_EQ(reducer.buckets().size(), 1u);
    for (const auto& parameter : replica.parameters) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(parameter->grad.const_data_ptr()) % 64, 0u);
      EXPECT_TRUE(parameter->grad.is_alias_of(reducer.buckets()[0].flat));
      EXPECT_TRUE(parameter->grad.is_non_overlapping_and_dense());
    }
    EXPECT_EQ(replica.parameters.back()->grad.strides(), strides);  // channels last
  });
}

// Streamed gradients whose sums have begun have memory until each replica has read them, also one that this replica has
// forgotten because another one owns it.
TEST(GradientReducer, HasRoomWhenStreamedGradientsAreRead) {
  for (const bool owned : {false, true}) {  // by the last replica
    std::barrier turn(2);
    on_replicas(2, [&](int r, Transport& transport) {
      Replica replica(three_layers());
      for (auto& parameter : replica.parameters) parameter->stream_grad();
      for (auto& item : replica.items) {
        if (owned) item.cuts = {{1, 0, item.parameter->numel()}};
      }
      GradientReducer reducer(transport, replica.items, 4001);
      const auto make = [&](const std::vector<size_t>& which) {
        for (const size_t i : which) {
          replica.parameters[i]->grad_to_add();
          reducer.gradient_done(*replica.parameters[i]);
        }
      };
      const auto forget = [&] {
        reducer.progress();
        for (Parameter* parameter : reducer.take_summed()) parameter->forget_grad();
        return false;
      };
      const std::unique_ptr<Wait> room = reducer.room();
      if (r == 1) {
        turn.arrive_and_wait();
        make({5, 4, 3, 2, 1});
        wait_for(*room, kTimeout, forget);
        turn.arrive_and_wait();
        return;
      }
      EXPECT_TRUE(room->ready());
      make({5});
      forget();
      EXPECT_TRUE(room->ready()) << "at most a bucket";
      make({4, 3, 2});
      forget();
      EXPECT_TRUE(room->ready()) << "at most three of the largest";
      make({1});
      forget();
      EXPECT_FALSE(room->ready());
      expect_contains(error_of([&] { wait_for(*room, 0.05, forget); }), {"layer 2", "not summed over replicas"});
      turn.arrive_and_wait();
      wait_for(*room, kTimeout, forget);
      turn.arrive_and_wait();
    });
  }
}

// The second replica has no micro-batches, so its streamed gradients are zeros. They do not exist all at once.
TEST(GradientReducer, MakesZerosWhileThereIsRoom) {
  on_replicas(2, [&](int r, Transport& transport) {
    Replica replica(three_layers());
    for (auto& parameter : replica.parameters) parameter->stream_grad();
    GradientReducer reducer(transport, replica.items, 1);
    for (size_t i = replica.parameters.size(); r == 0 && i-- > 0;) {
      replica.parameters[i]->grad_to_add().fill_(static_cast<double>(i));
      reducer.gradient_done(*replica.parameters[i]);
    }
    size_t most = 0;
    std::vector<double> sums;
    const auto forget = [&] {
      const auto has_memory = [](const auto& parameter) { return parameter->grad.defined(); };
      most = std::max<size_t>(most, std::ranges::count_if(replica.parameters, has_memory));
      for (Parameter* parameter : reducer.take_summed()) {
        sums.push_back(parameter->grad.flatten()[0].item<double>());
        parameter->forget_grad();
      }
    };
    reducer.finish(kTimeout, forget);
    forget();
    EXPECT_EQ(sums, (std::vector<double>{5, 4, 3, 2, 1, 0}));
    if (r == 1) EXPECT_LT(most, replica.parameters.size());
  });
}

TEST(GradientReducer, NamesTheLayersThatAReplicaDoesNotSum) {
  std::string message;
  on_replicas(2, [&](int r, Transport& transport) {
    if (r == 1) return;
    Replica replica(three_layers());
    GradientReducer reducer(transport, replica.items, 8000);
    message = error_of([&] { reducer.finish(0.05); });
  });
  expect_contains(message, {"layers layer 1 to layer 2", "replicas", "0.05 s", "rank 1"});
}

}  // namespace
}  // namespace twobp::test
