// The meeting place of the processes of a run that was started without MPI: a key-value store at
// MASTER_ADDR:MASTER_PORT, found through the environment that torchrun and srun set. It is LibTorch's TCPStore, which
// PyTorch's programs use too.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "twobp/transport/start.h"
#include "twobp/transport/transport.h"

namespace twobp {

struct StorePlace {
  std::string address;  // of the store
  int port = 29500;
  int rank = 0;
  int size = 1;
  bool hosted = false;    // the launcher runs the store; otherwise rank 0 does
  std::string job = "1";  // distinguishes runs that use the same store one after the other
};

// For a process that `launcher` started. Throws Error if the launcher does not give the address of rank 0.
StorePlace store_place(const Launcher& launcher);

// One process's connection to the store. Any thread may use it. A waiting call blocks calls from other threads, so a
// thread with long waits needs its own connection.
class StoreConnection {
 public:
  // Returns when all ranks have connected. Throws Error if the port is in use, the store does not answer, ranks are
  // missing after `timeout` seconds (named), two ranks are the same, or they were started with different sizes.
  StoreConnection(const StorePlace& place, double timeout);
  // If this process runs the store, waits for the others to leave, at most ten seconds.
  ~StoreConnection();
  StoreConnection(const StoreConnection&) = delete;
  StoreConnection& operator=(const StoreConnection&) = delete;

  int rank() const { return place_.rank; }
  int size() const { return place_.size; }
  const StorePlace& place() const { return place_; }
  // "host:port".
  std::string name() const;

  // All of these throw Error if the store is gone.
  void set(const std::string& key, const std::string& value);
  // Sets the key unless a rank has set it. Returns the value that it has then.
  std::string set_once(const std::string& key, const std::string& value);
  // Waits at most `timeout` seconds for the key.
  std::string get(const std::string& key, double timeout);
  // A queue: values arrive in the order in which each sender pushed them. A value has at most kMostBytes.
  void push(const std::string& queue, const std::string& value);
  // Waits without limit.
  std::string pop(const std::string& queue);
  static constexpr size_t kMostBytes = size_t{4} << 20;

  // Another connection to the same store.
  std::unique_ptr<StoreConnection> connect() const;
  // The number of requests that this connection, and those that connect() made of it, have sent to the store.
  int64_t requests() const;
  // Makes the destructor wait for at most so many seconds, because the others may be dead.
  void leave_within(double seconds) { leave_seconds_ = seconds; }

 private:
  struct Store;
  StoreConnection(StorePlace place, std::unique_ptr<Store> store);
  void join(double timeout);
  std::string missing_ranks(double timeout);

  StorePlace place_;
  std::unique_ptr<Store> store_;
  bool joined_ = false;  // whether the store waits for this process
  std::atomic<double> leave_seconds_{10};
};

// Messages through a store (store_connection.h), for small and rare messages between processes that were started
// without MPI (reports, sums of a few numbers, the heads of NCCL's messages). A message takes tens of microseconds, and
// all of them go through the process that runs the store. Only host tensors are supported.

// A transport between all processes at the store, with their ranks. A separate thread receives, so that looking for a
// message costs nothing. It fails when messages without an end have more than `most_unfinished` bytes: no rank sends so
// much.
std::unique_ptr<Transport> make_store_transport(std::shared_ptr<StoreConnection> connection,
                                                size_t most_unfinished = size_t{1} << 30);

}  // namespace twobp
