#include "tests/transport/device_transports.h"

#include <arpa/inet.h>
#include <atomic>
#include <barrier>
#include <chrono>
#include <exception>
#include <mutex>
#include <netinet/in.h>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

#include "tests/nn/device/stand_in_device.h"
#include "tests/transport/stand_in_nccl.h"
#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/transport/store/store_connection.h"
#include "twobp/transport/threads/in_process.h"

namespace twobp::test {
namespace {

constexpr double kLong = 60;  // seconds

class ByWayOf : public Transport {
 public:
  ByWayOf(const Device& device, std::unique_ptr<Transport> inner)
      : device_(device), inner_(std::move(inner)), real_(device.where().is_cuda()) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  void isend(int to, const Tag& tag, Values values) override {
    const OnStream here(device_.compute());
    inner_->isend(to, tag, on_device(std::move(values)));
  }
  bool expect(int from, const Tag& tag, const Forms& forms) override {
    const OnStream here(device_.compute());
    return inner_->expect(from, tag, forms);
  }
  void isend_expected(int to, const Tag& tag, Values values) override {
    const OnStream here(device_.compute());
    inner_->isend_expected(to, tag, on_device(std::move(values)));
  }
  bool try_receive(int from, const Tag& tag, Values& values) override {
    const OnStream here(device_.compute());
    if (!inner_->try_receive(from, tag, values)) return false;
    values = arrived(std::move(values));
    return true;
  }
  Values receive(int from, const Tag& tag, double timeout) override {
    const OnStream here(device_.compute());
    return arrived(inner_->receive(from, tag, timeout));
  }
  void progress() override {
    const OnStream here(device_.compute());
    inner_->progress();
  }
  std::optional<int> unsent_to() override {
    const OnStream here(device_.compute());
    return inner_->unsent_to();
  }
  void abort(const std::string& reason) override { inner_->abort(reason); }

 private:
  Values on_device(Values values) const {
    for (at::Tensor& value : values) {
      if (real_ && value.defined()) value = value.to(device_.where());
    }
    return values;
  }
  Values arrived(Values values) {
    device_.compute().wait_on_host();
    for (at::Tensor& value : values) {
      if (real_ && value.defined()) value = value.cpu();
    }
    return values;
  }

  Device device_;
  std::unique_ptr<Transport> inner_;
  bool real_;
};

// Ends a rank. Its sent messages may still wait on its host (transport.h). Messages that others send need a rank that
// looks for them, whether it wants them or not. So each rank looks for messages until all are done.
void leave(Transport& end, std::atomic<int>& left) {
  try {
    end.flush(kLong);
    ++left;
    while (left < end.size()) {
      end.progress();
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  } catch (const Aborted&) {
    left = end.size();  // the body ended with an abort, here or at another rank, and an abort ends all ranks
  }
}

// Makes an endpoint for each rank on its own thread, because endpoints may wait for each other. They are destroyed when
// all bodies are done, because processes end together.
void run(int ranks, const std::function<std::unique_ptr<Transport>(int)>& make, const RankBody& body) {
  std::barrier all_done(ranks);
  std::atomic<int> left = 0;
  run_on_threads(ranks, [&](int rank) {
    std::unique_ptr<Transport> end;
    std::exception_ptr error;
    try {
      end = make(rank);
      body(*end);
      leave(*end, left);
    } catch (...) {
      error = std::current_exception();
      if (end) end->abort("another rank of the test failed");
      left = ranks;  // no rank waits for this one
    }
    all_done.arrive_and_wait();
    end.reset();
    if (error) std::rethrow_exception(error);
  });
}

using Hosts = std::function<std::unique_ptr<Transport>(int rank)>;

Hosts in_process_hosts(int ranks) {
  auto ends = std::make_shared<std::vector<std::unique_ptr<Transport>>>(make_in_process_transports(ranks, 0));
  return [ends](int rank) { return std::move((*ends)[rank]); };
}

sockaddr_in at_port(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  return address;
}

// Waits until rank 0's store listens. If LibTorch is refused once, it tries again after half a second or so. First it
// looks up the address's name for its message, which takes seconds if no name server answers.
void wait_for_listener(int port) {
  const sockaddr_in address = at_port(port);
  const double deadline = now_seconds() + kLong;
  for (bool listens = false; !listens; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
    TWOBP_CHECK(now_seconds() < deadline, "nobody listens at port ", port);
    const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
    listens = ::connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
    ::close(socket);
  }
}

Hosts store_hosts(int ranks) {
  return [ranks, port = free_port()](int rank) {
    if (rank > 0) wait_for_listener(port);
    StorePlace place;
    place.address = "127.0.0.1";
    place.port = port;
    place.rank = rank;
    place.size = ranks;
    return make_store_transport(std::make_shared<StoreConnection>(place, 30));
  };
}

void run_on_stand_in(int ranks, const Hosts& hosts, const RankBody& body) {
  run(
      ranks,
      [&](int rank) {
        const Device device = stand_in_device(rank);
        NcclOptions options;
        options.tensors = at::kCPU;
        return by_way_of(device, make_nccl_transport(hosts(rank), stand_in_nccl(), device, all_links(ranks), options));
      },
      body);
}

void run_on_nccl(int ranks, const RankBody& body) {
  if (nccl_gpus() < ranks) GTEST_SKIP() << "needs NCCL and " << ranks << " GPUs, there are " << nccl_gpus();
  const Hosts hosts = in_process_hosts(ranks);
  run(
      ranks,
      [&](int rank) {
        const Device device = Device::open("cuda", rank);
        return by_way_of(device, make_nccl_transport(hosts(rank), load_nccl(), device, all_links(ranks)));
      },
      body);
}

}  // namespace

void run_on_threads(int ranks, const std::function<void(int rank)>& body) {
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

void run_on_store(int ranks, const std::function<void(std::shared_ptr<Transport>)>& body) {
  const Hosts hosts = store_hosts(ranks);
  run_on_threads(ranks, [&](int rank) { body(hosts(rank)); });
}

int nccl_gpus() {
  const auto* cuda = c10::impl::device_guard_impl_registry[static_cast<size_t>(at::kCUDA)].load();
  if (!cuda) return 0;
  try {
    load_nccl();
  } catch (const Error&) {
    return 0;
  }
  return cuda->deviceCount();
}

NcclLinks all_links(int ranks) {
  NcclLinks links;
  for (int from = 0; from < ranks; ++from) {
    for (int to = 0; to < ranks; ++to) {
      if (from != to) links.emplace_back(from, to);
    }
  }
  return links;
}

std::unique_ptr<Transport> by_way_of(const Device& device, std::unique_ptr<Transport> inner) {
  return std::make_unique<ByWayOf>(device, std::move(inner));
}

std::vector<World> worlds() {
  constexpr int kAny = std::numeric_limits<int>::max();
  return {
      {"Store", [](int ranks, const RankBody& body) { test::run(ranks, store_hosts(ranks), body); }},
      {"NcclStandIn", [](int ranks, const RankBody& body) { run_on_stand_in(ranks, in_process_hosts(ranks), body); },
       kAny, /*device_waits=*/true},
      {"NcclStandInWithStore",
       [](int ranks, const RankBody& body) { run_on_stand_in(ranks, store_hosts(ranks), body); }, kAny,
       /*device_waits=*/true},
      {"Nccl", run_on_nccl, std::max(nccl_gpus(), 1), /*device_waits=*/true}};
}

}  // namespace twobp::test
