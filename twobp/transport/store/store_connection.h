// Where the processes of a run that was started without MPI meet: a key-value store at
// MASTER_ADDR:MASTER_PORT (LibTorch's TCPStore, the one that PyTorch's programs meet at), found through the
// environment that torchrun and srun set.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "twobp/transport/launcher.h"

namespace twobp {

struct StorePlace {
  std::string address;  // of the store
  int port = 29500;
  int rank = 0;
  int size = 1;
  int local_rank = 0;     // on this machine: picks the GPU
  bool hosted = false;    // the launcher runs the store; else rank 0 does
  std::string job = "1";  // keeps apart what runs one after the other at the same store
};

// For a process that `launcher` started. Throws Error if the launcher doesn't say where rank 0 is.
StorePlace store_place(const Launcher& launcher);

// One process's connection to the store. Any thread; a call that waits makes calls from other threads wait,
// so that a thread that waits long has a connection of its own.
class StoreConnection {
 public:
  // Returns when all have come. Throws Error: the port is in use, nobody answers, ranks that have not come in
  // `timeout` seconds (named), two that claim the same rank, or that were started with unequal sizes.
  StoreConnection(const StorePlace& place, double timeout);
  // Waits for the others to leave too (at most ten seconds) if this process runs the store.
  ~StoreConnection();
  StoreConnection(const StoreConnection&) = delete;
  StoreConnection& operator=(const StoreConnection&) = delete;

  int rank() const { return place_.rank; }
  int size() const { return place_.size; }
  const StorePlace& place() const { return place_; }
  // "host:port".
  std::string name() const;

  // All of them throw Error when the store is gone.
  void set(const std::string& key, const std::string& value);
  // Waits for the key, at most `timeout` seconds.
  std::string get(const std::string& key, double timeout);
  // A queue: what one pushes one pops, in order of each pusher. At most kMostBytes a value.
  void push(const std::string& queue, const std::string& value);
  // Waits for as long as it takes.
  std::string pop(const std::string& queue);
  static constexpr size_t kMostBytes = size_t{4} << 20;

  // The same store through another connection.
  std::unique_ptr<StoreConnection> connect() const;
  // The others are not waited for at the end: they may be dead.
  void leave_at_once() { wait_for_others_ = false; }

 private:
  struct Store;
  StoreConnection(StorePlace place, std::unique_ptr<Store> store);
  void join(double timeout);

  StorePlace place_;
  std::unique_ptr<Store> store_;
  bool joined_ = false;  // counts among those that the store waits for
  std::atomic<bool> wait_for_others_{true};
};

}  // namespace twobp
