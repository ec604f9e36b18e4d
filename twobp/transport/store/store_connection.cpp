#include "twobp/transport/store/store_connection.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <iomanip>
#include <netdb.h>
#include <optional>
#include <random>
#include <sstream>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/transport/message.h"

namespace twobp {
namespace {

constexpr double kRefusalSeconds = 0.5;  // time for the others to read the reason
constexpr double kRetrySeconds = 0.02;
constexpr double kMissingSeconds = 2;  // for one rank to say which ones are missing

std::string env(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

std::vector<uint8_t> bytes_of(const std::string& text) {
  return {text.begin(), text.end()};
}

std::chrono::milliseconds to_milliseconds(double seconds) {
  return std::chrono::milliseconds(std::max<int64_t>(1, static_cast<int64_t>(1000 * seconds)));
}

void sleep_for(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

// c10d writes every error to stderr with a backtrace. We report one message instead.
void quiet_c10d() {
  [[maybe_unused]] static const bool once = [] {  // read by c10d's threads
    if (!std::getenv("TORCH_CPP_LOG_LEVEL")) FLAGS_caffe2_log_level = c10::GLOG_FATAL;
    return true;
  }();
}

// c10d's server runs on a thread that inherits this one's mask. It writes to whoever has connected, also to a stranger
// who has gone. The signal for that would look like the end of the output's reader.
class WithoutSigpipe {
 public:
  WithoutSigpipe() {
    sigset_t pipe;
    ::sigemptyset(&pipe);
    ::sigaddset(&pipe, SIGPIPE);
    ::pthread_sigmask(SIG_BLOCK, &pipe, &before_);
  }
  ~WithoutSigpipe() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  WithoutSigpipe(const WithoutSigpipe&) = delete;
  WithoutSigpipe& operator=(const WithoutSigpipe&) = delete;

 private:
  sigset_t before_{};
};

// c10d sleeps for up to five seconds after a refused connection. So a process that comes before the host retries with
// time-outs of its own, short ones first. They are measured on the clock that c10d uses for its waits.
c10::intrusive_ptr<c10d::TCPStore> open_store(const std::string& address, c10d::TCPStoreOptions options,
                                              double timeout) {
  const WithoutSigpipe for_server;
  const double deadline = now_seconds() + timeout;
  for (double patience = options.isServer ? timeout : 0.2; true; patience *= 2) {
    try {
      options.timeout = to_milliseconds(std::min(patience, deadline - now_seconds()));
      auto store = c10::make_intrusive<c10d::TCPStore>(address, options);
      store->setTimeout(to_milliseconds(timeout));
      return store;
    } catch (const c10::Error&) {
      if (options.isServer || now_seconds() >= deadline) throw;
      sleep_for(kRetrySeconds);
    }
  }
}

// Counts the processes that say that they are this rank.
std::string came_key(int rank) {
  return concat("came/", rank);
}

// 128 random bits.
std::string random_id() {
  std::random_device random;
  std::ostringstream id;
  for (int i = 0; i < 4; ++i) id << std::hex << std::setw(8) << std::setfill('0') << random();
  return id.str();
}

[[noreturn]] void fail_in_use(int port) {
  fail("rank 0 cannot listen at port ", port, ": it is in use, perhaps by another run; set MASTER_PORT to a free one");
}

// A socket that is bound to the interface of MASTER_ADDR. None if that is the name of a host, which may mean another
// interface to other hosts, or an address that this host does not have itself. c10d then listens at all interfaces.
std::optional<int> bind_to(const StorePlace& place) {
  const std::string address = place.address == "localhost" ? "127.0.0.1" : place.address;
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_PASSIVE;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(address.c_str(), std::to_string(place.port).c_str(), &hints, &found) != 0) return std::nullopt;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
  const int fd = ::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return std::nullopt;
  const int on = 1;
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));  // the last run's connections may linger
  if (::bind(fd, found->ai_addr, found->ai_addrlen) == 0) return fd;
  const int error = errno;
  ::close(fd);
  if (error == EADDRINUSE) fail_in_use(place.port);
  return std::nullopt;
}

}  // namespace

StorePlace store_place(const Launcher& launcher) {
  TWOBP_CHECK(!launcher.master_address.empty(), "rank ", launcher.rank,
              " has no address to meet the other ranks: set MASTER_ADDR to the host of rank 0 and MASTER_PORT to "
              "a free port there, or start with torchrun --no-python");
  StorePlace place;
  place.address = launcher.master_address;
  if (launcher.master_port > 0) place.port = launcher.master_port;
  place.rank = launcher.rank;
  place.size = launcher.size;
  place.hosted = env("TORCHELASTIC_USE_AGENT_STORE") == "True";
  if (!env("TORCHELASTIC_RUN_ID").empty()) {
    place.job = concat(env("TORCHELASTIC_RUN_ID"), ".", env("TORCHELASTIC_RESTART_COUNT"));
  } else if (launcher.kind == Launcher::Kind::kSlurm) {
    place.job = concat(env("SLURM_JOB_ID"), ".", env("SLURM_STEP_ID"));
  }
  return place;
}

// The store, with errors of our type and keys under the job's name.
struct StoreConnection::Store {
  c10::intrusive_ptr<c10d::Store> store;
  std::string name, prefix;
  std::shared_ptr<std::atomic<int64_t>> requests = std::make_shared<std::atomic<int64_t>>(0);  // of all connections

  template <typename Body>
  auto call(const Body& body) {
    ++*requests;
    try {
      return body(*store);
    } catch (const c10::Error& error) {
      fail("the store at ", name,
           " does not answer any more: the process that runs it has ended, or the "
           "network has failed (",
           error.what_without_backtrace(), ")");
    }
  }
  std::string key(const std::string& name) const { return prefix + name; }
  bool has(const std::string& name) {
    return call([&](c10d::Store& s) { return s.check({key(name)}); });
  }
  // Waits until a rank has set the key, at most `seconds`. Returns whether it is there.
  bool wait(const std::string& name, double seconds) {
    ++*requests;
    try {
      store->wait({key(name)}, to_milliseconds(seconds));
      return true;
    } catch (const c10::Error&) {
      return has(name);  // throws if not the time-out, but the end of the store was the reason
    }
  }
  std::string value(const std::string& name) {
    const std::vector<uint8_t> bytes = call([&](c10d::Store& s) { return s.get(key(name)); });
    return {bytes.begin(), bytes.end()};
  }
  void set(const std::string& name, const std::string& value) {
    call([&](c10d::Store& s) { s.set(key(name), bytes_of(value)); });
  }
  std::string set_once(const std::string& name, const std::string& value) {
    const std::vector<uint8_t> bytes =
        call([&](c10d::Store& s) { return s.compareSet(key(name), {}, bytes_of(value)); });
    return {bytes.begin(), bytes.end()};
  }
  int64_t add(const std::string& name, int64_t value) {
    return call([&](c10d::Store& s) { return s.add(key(name), value); });
  }
};

StoreConnection::StoreConnection(const StorePlace& place, double timeout) : place_(place) {
  TWOBP_CHECK(place_.size >= 1 && place_.rank >= 0 && place_.rank < place_.size, "rank ", place_.rank,
              " does not exist: the run has ", place_.size, " ranks, counted from 0");
  TWOBP_CHECK(place_.port >= 0 && place_.port <= 65535, "port ", place_.port,
              " does not exist: ports are from 0 to 65535");
  quiet_c10d();
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(place_.port);
  options.isServer = place_.rank == 0 && !place_.hosted;
  options.waitWorkers = false;  // join() names the missing ranks
  if (options.isServer) options.masterListenFd = bind_to(place_);
  store_ = std::make_unique<Store>();
  store_->name = name();
  store_->prefix = concat("twobp/", place_.job, "/");
  try {
    const auto store = open_store(place_.address, options, timeout);
    place_.port = store->getPort();  // 0: the system chooses one
    store_->name = name();
    store_->store = store;
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    if (what.find("EADDRINUSE") != std::string::npos) fail_in_use(place_.port);
    TWOBP_CHECK(!options.isServer, "rank 0 cannot listen at ", name(), ": ", what);
    fail("rank ", place_.rank, " got no answer from ", name(), " within ", timeout,
         " s: check that rank 0 has started there and that MASTER_ADDR and MASTER_PORT are right (", what, ")");
  }
  join(timeout);
}

StoreConnection::StoreConnection(StorePlace place, std::unique_ptr<Store> store)
    : place_(std::move(place)), store_(std::move(store)) {}

// Every rank makes a fixed number of requests. So the store's work grows with the number of ranks, not with its square.
void StoreConnection::join(double timeout) {
  const double deadline = awake_seconds() + timeout;
  const std::string all_are_there = "all";
  const auto leave = [&](const std::string& reason) {
    if (place_.rank == 0 && !place_.hosted) sleep_for(kRefusalSeconds);  // the store ends with this process
    fail(reason);
  };
  // The first end that a rank writes holds for all: that all are there, or what is wrong. So the others do not wait for
  // the time-out.
  const auto refuse = [&](const std::string& reason) {
    const std::string end = store_->set_once("end", reason);
    leave(end == all_are_there ? reason : end);
  };
  // Rank 0 draws the run's id, which stands in all other keys. So what other programs write under keys that can be
  // guessed, and what an earlier run has left, does not reach this run.
  if (place_.rank == 0 && store_->add("hosts", 1) == 1) {
    const std::string id = random_id();
    store_->set(id + "/size", std::to_string(place_.size));
    store_->set("run", id);
  }
  TWOBP_CHECK(store_->wait("run", deadline - awake_seconds()), "rank 0 of ", place_.size, " did not connect to ",
              name(), " within ", timeout, " s: check that it has started");
  store_->prefix += store_->value("run") + "/";
  if (store_->add(came_key(place_.rank), 1) > 1) {
    refuse(concat("two processes that meet at ", name(), " say that they are rank ", place_.rank,
                  ": another run uses the same MASTER_PORT, or the launcher's RANK is wrong"));
  }
  const std::string size = store_->value("size");
  if (size != std::to_string(place_.size)) {
    refuse(concat("the ranks were started with unequal sizes: rank 0 as one of ", size, ", rank ", place_.rank,
                  " as one of ", place_.size));
  }
  if (store_->add("came", 1) == place_.size) store_->set_once("end", all_are_there);
  if (!store_->wait("end", deadline - awake_seconds())) {
    // One rank looks for the missing ones. If it ends meanwhile, another does.
    if (store_->add("looks", 1) == 1 || !store_->wait("end", kMissingSeconds))
      store_->set_once("end", missing_ranks(timeout));
  }
  const std::string end = store_->value("end");
  if (end != all_are_there) leave(end);
  joined_ = true;
}

std::string StoreConnection::missing_ranks(double timeout) {
  std::vector<int> missing;
  for (int rank = 0; rank < place_.size; ++rank) {
    if (!store_->has(came_key(rank))) missing.push_back(rank);
  }
  return concat(missing.empty() ? "a rank" : names_of_ranks(missing), " of ", place_.size, " did not connect to ",
                name(), " within ", timeout, " s: check that they have started");
}

StoreConnection::~StoreConnection() {
  if (!joined_) return;
  try {
    const int64_t left = store_->add("left", 1);
    if (place_.rank > 0 || place_.hosted) return;
    const double deadline = awake_seconds() + leave_seconds_;
    for (int64_t gone = left; gone < place_.size && awake_seconds() < deadline; sleep_for(1e-3)) {
      gone = store_->add("left", 0);
    }
  } catch (const std::exception&) {
    // The store no longer exists, so there is nothing to wait for.
  }
}

std::string StoreConnection::name() const {
  return concat(place_.address, ":", place_.port);
}

int64_t StoreConnection::requests() const {
  return *store_->requests;
}

void StoreConnection::set(const std::string& key, const std::string& value) {
  store_->set(concat("key/", key), value);
}

std::string StoreConnection::set_once(const std::string& key, const std::string& value) {
  return store_->set_once(concat("key/", key), value);
}

std::string StoreConnection::get(const std::string& key, double timeout) {
  const double deadline = awake_seconds() + timeout;
  for (double pause = 1e-4; !store_->has(concat("key/", key)); pause = std::min(2 * pause, 0.05)) {
    TWOBP_CHECK(awake_seconds() < deadline, "rank ", place_.rank, " waited ", timeout, " s at ", name(), " for '", key,
                "', which no rank has set");
    sleep_for(pause);
  }
  return store_->value(concat("key/", key));
}

void StoreConnection::push(const std::string& queue, const std::string& value) {
  TWOBP_CHECK(value.size() <= kMostBytes, "a value of ", value.size(), " bytes for the store, at most ", kMostBytes,
              " are taken");
  store_->call([&](c10d::Store& s) { s.queuePush(store_->key(concat("queue/", queue)), bytes_of(value)); });
}

std::string StoreConnection::pop(const std::string& queue) {
  const std::string key = store_->key(concat("queue/", queue));
  const std::vector<uint8_t> bytes = store_->call([&](c10d::Store& s) { return s.queuePop(key, true); });
  return {bytes.begin(), bytes.end()};
}

std::unique_ptr<StoreConnection> StoreConnection::connect() const {
  auto store = std::make_unique<Store>();
  store->name = store_->name;
  store->prefix = store_->prefix;
  store->requests = store_->requests;
  store->store = store_->call([](c10d::Store& s) { return s.clone(); });
  store->store->setTimeout(std::chrono::hours(24 * 365));  // pop() waits without limit
  return std::unique_ptr<StoreConnection>(new StoreConnection(place_, std::move(store)));
}

}  // namespace twobp
