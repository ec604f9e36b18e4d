#include "twobp/pipeline/memory/memory_meter.h"

#include <mutex>
#include <numeric>
#include <optional>
#include <unordered_map>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "twobp/core/check.h"

namespace twobp {
namespace {

void grow(MemoryUse& use, MemoryCategory category, int64_t bytes) {
  use.now[static_cast<int>(category)] += bytes;
  if (bytes > 0) {
    const int64_t total = use.total();
    if (total > use.peak) {
      use.peak = total;
      use.at_peak = use.now;
    }
  }
}

}  // namespace

std::string_view category_name(MemoryCategory category) {
  constexpr std::array<std::string_view, kMemoryCategories> names = {"parameters", "gradients", "optimizer",
                                                                     "activations", "p2 stash"};
  return names[static_cast<int>(category)];
}

int64_t MemoryUse::total() const {
  return std::accumulate(now.begin(), now.end(), int64_t{0});
}

// The reporter that LibTorch calls. All watched threads share it.
struct MemoryMeter::Books : c10::MemoryReportingInfoBase {
  struct Owner {
    int stage = -1;  // -1: not counted
    MemoryCategory category = MemoryCategory::kActivations;
  };
  static thread_local Owner current_owner;  // of what this thread allocates

  struct Entry {
    Owner owner;
    int64_t bytes = 0;
  };

  void reportMemoryUsage(void* ptr, int64_t alloc_size, size_t, size_t, c10::Device) override {
    if (alloc_size > 0) {
      if (current_owner.stage < 0) return;
      const std::lock_guard lock(mutex);
      const auto [found, fresh] = entries.try_emplace(ptr);
      if (!fresh) book(found->second.owner, -found->second.bytes);  // released on a thread that is not watched
      found->second = {current_owner, alloc_size};
      book(current_owner, alloc_size);
    } else if (!forget(ptr)) {
      forget_elsewhere(ptr);
    }
  }
  bool memoryProfilingEnabled() const override { return true; }

  bool forget(const void* ptr) {
    const std::lock_guard lock(mutex);
    const auto found = entries.find(ptr);
    if (found == entries.end()) return false;
    book(found->second.owner, -found->second.bytes);
    entries.erase(found);
    return true;
  }

  // Replicas in one process have one meter each, and hand tensors to each other.
  struct Registry {
    std::mutex mutex;
    std::vector<Books*> all;
    std::atomic<int> count{0};
  };
  static Registry& registry() {
    static Registry registry;
    return registry;
  }
  Books() {
    const std::lock_guard lock(registry().mutex);
    registry().all.push_back(this);
    ++registry().count;
  }
  ~Books() override {
    const std::lock_guard lock(registry().mutex);
    std::erase(registry().all, this);
    --registry().count;
  }
  void forget_elsewhere(const void* ptr) {
    if (registry().count.load(std::memory_order_relaxed) < 2) return;
    const std::lock_guard lock(registry().mutex);
    for (Books* books : registry().all) {
      if (books != this && books->forget(ptr)) return;
    }
  }

  // `bytes`: the size of memory that is not on the books yet; 0: such memory stays off them.
  void rebook(const void* ptr, int64_t bytes, const Owner& owner) {
    const std::lock_guard lock(mutex);
    const auto found = entries.find(ptr);
    if (found == entries.end()) {
      if (bytes == 0) return;
      entries[ptr] = {owner, bytes};
      return book(owner, bytes);
    }
    Entry& entry = found->second;
    if (entry.owner.stage == owner.stage && entry.owner.category == owner.category) return;
    book(entry.owner, -entry.bytes);
    entry.owner = owner;
    book(owner, entry.bytes);
  }

  void book(const Owner& owner, int64_t bytes) {
    grow(stages[owner.stage], owner.category, bytes);
    const int rank = rank_of_stage[owner.stage];
    grow(ranks[rank], owner.category, bytes);
    high_water[rank] = std::max(high_water[rank], ranks[rank].total());
    if (owner.category >= MemoryCategory::kActivations) held[rank].fetch_add(bytes, std::memory_order_relaxed);
  }

  std::vector<int> rank_of_stage;
  mutable std::mutex mutex;
  std::unordered_map<const void*, Entry> entries;
  std::vector<MemoryUse> stages;
  std::vector<MemoryUse> ranks;
  std::vector<int64_t> high_water;
  std::unique_ptr<std::atomic<int64_t>[]> held;
};

constinit thread_local MemoryMeter::Books::Owner MemoryMeter::Books::current_owner;

MemoryMeter::MemoryMeter(std::vector<int> rank_of_stage) : books_(std::make_shared<Books>()) {
  int ranks = 0;
  for (const int rank : rank_of_stage) ranks = std::max(ranks, rank + 1);
  books_->stages.resize(rank_of_stage.size());
  books_->ranks.resize(ranks);
  books_->high_water.resize(ranks);
  books_->held = std::make_unique<std::atomic<int64_t>[]>(ranks);
  books_->rank_of_stage = std::move(rank_of_stage);
}

MemoryMeter::~MemoryMeter() = default;

// LibTorch has one reporter for each thread. If it is a profiler's, whose callbacks look for their own state there, it
// stays, and the block cache reports to the meter besides.
struct MemoryMeter::Watch::Guard {
  explicit Guard(const std::shared_ptr<Books>& books) : before(std::exchange(current, {})) {
    const auto* const there = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE);
    if (there == nullptr || there == before.reporter || there == books.get()) {
      current.reporter = books.get();
      guard.emplace(c10::DebugInfoKind::PROFILER_STATE, books);
    } else {
      current.beside_profiler = books.get();
    }
  }
  ~Guard() { current = before; }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  struct Of {
    const c10::DebugInfoBase* reporter = nullptr;
    Books* beside_profiler = nullptr;
  };
  static thread_local Of current;  // of this thread
  Of before;
  std::optional<c10::DebugInfoGuard> guard;
};

constinit thread_local MemoryMeter::Watch::Guard::Of MemoryMeter::Watch::Guard::current;

MemoryMeter::Watch::Watch(const MemoryMeter& meter) : guard_(std::make_unique<Guard>(meter.books_)) {}
MemoryMeter::Watch::~Watch() = default;

void MemoryMeter::report_beside_profiler(void* data, int64_t bytes) {
  if (Books* const books = Watch::Guard::current.beside_profiler)
    books->reportMemoryUsage(data, bytes, 0, 0, c10::Device(c10::kCPU));
}

MemoryMeter::Scope::Scope(int stage, MemoryCategory category)
    : stage_(Books::current_owner.stage), category_(Books::current_owner.category) {
  Books::current_owner = {stage, category};
}

MemoryMeter::Scope::~Scope() {
  Books::current_owner = {stage_, category_};
}

void MemoryMeter::rebook(const at::Tensor& tensor, int stage, MemoryCategory category) {
  if (tensor.defined()) books_->rebook(tensor.storage().data(), 0, {stage, category});
}

void MemoryMeter::book(const at::Tensor& tensor, int stage, MemoryCategory category) {
  if (!tensor.defined()) return;
  const auto bytes = static_cast<int64_t>(tensor.storage().nbytes());
  books_->forget_elsewhere(tensor.storage().data());
  books_->rebook(tensor.storage().data(), bytes, {stage, category});
}

MemoryUse MemoryMeter::stage_use(int stage) const {
  const std::lock_guard lock(books_->mutex);
  return books_->stages.at(stage);
}

MemoryUse MemoryMeter::rank_use(int rank) const {
  const std::lock_guard lock(books_->mutex);
  return books_->ranks.at(rank);
}

int64_t MemoryMeter::held(int rank) const {
  return books_->held[rank].load(std::memory_order_relaxed);
}

int64_t MemoryMeter::take_high_water(int rank) {
  const std::lock_guard lock(books_->mutex);
  return std::exchange(books_->high_water[rank], books_->ranks[rank].total());
}

void MemoryMeter::reset_peaks() {
  const std::lock_guard lock(books_->mutex);
  for (auto* uses : {&books_->stages, &books_->ranks}) {
    for (MemoryUse& use : *uses) {
      use.peak = use.total();
      use.at_peak = use.now;
    }
  }
}

}  // namespace twobp
