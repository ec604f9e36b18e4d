#include "twobp/transport/processes.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/transport/collectives.h"

namespace twobp {
namespace {

using nlohmann::json;

at::Tensor text_bytes(const std::string& text) {
  at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::TensorOptions().dtype(at::kByte));
  if (!text.empty()) std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

std::string text_of(const at::Tensor& bytes) {
  TWOBP_CHECK(bytes.scalar_type() == at::kByte,
              "the processes do not make the same calls in the same order: one expects a text, but receives ",
              bytes.scalar_type());
  return {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())};
}

// For together(): a working process sends messages without a tensor, and finally one with a text.
constexpr Tag kReport = {.kind = MessageKind::kEndOfWork};
constexpr Tag kVerdict = {.kind = MessageKind::kVerdict};
constexpr int kBeats = 4;  // messages within a time-out
constexpr int kMostTimeouts = 20;

// While this object lives, it tells `to` that this process is working.
class Beats {
 public:
  Beats(Transport& transport, std::vector<int> to, const Tag& tag, double timeout)
      : thread_([=, this, &transport] {
          const auto period = std::chrono::duration<double>(timeout / kBeats);
          std::unique_lock lock(mutex_);
          for (int left = kMostTimeouts * kBeats; left > 0; --left) {
            try {
              for (const int process : to) transport.isend(process, tag, {});
            } catch (const std::exception&) {
              return;  // the thread that this one speaks for gets the same error
            }
            if (stop_.wait_for(lock, period, [&] { return stopped_; })) return;
          }
        }) {}
  ~Beats() {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    stop_.notify_all();
    thread_.join();
  }
  Beats(const Beats&) = delete;
  Beats& operator=(const Beats&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable stop_;
  bool stopped_ = false;
  std::thread thread_;  // last, because it uses the other members
};

// Receives from a process that may work for longer than the time-out.
std::string receive_text(Transport& transport, int from, const Tag& tag, double timeout) {
  while (true) {
    const Values values = transport.receive(from, tag, timeout);
    if (!values.empty()) return text_of(values[0]);
  }
}

}  // namespace

Processes::Processes(Transport& transport, double timeout)
    : transport_(&transport), timeout_(timeout), index_(transport.rank()), count_(transport.size()) {}

// Messages have left when a call returns: ranks must not free this thread's tensors, because their memory is metered.
std::string Processes::from_first(const std::string& text) const {
  if (count_ == 1) return text;
  at::Tensor bytes = is_first() ? text_bytes(text) : at::Tensor();
  broadcast(*transport_, bytes, 0, timeout_);
  transport_->flush(timeout_);
  return text_of(bytes);
}

std::vector<std::string> Processes::to_first(const std::string& text) const {
  std::vector<std::string> texts;
  for (const Values& values : tensors_to_first({text_bytes(text)})) texts.push_back(text_of(values.at(0)));
  return texts;
}

std::vector<Values> Processes::tensors_to_first(const Values& tensors) const {
  if (count_ == 1) return {tensors};
  std::vector<Values> all = gather(*transport_, tensors, 0, timeout_);
  transport_->flush(timeout_);
  return all;
}

void Processes::together(const std::function<void()>& body) const {
  if (count_ == 1) return body();
  std::vector<int> others;
  for (int process = 1; process < count_; ++process) others.push_back(process);
  std::optional<Beats> beats(std::in_place, *transport_, is_first() ? others : std::vector<int>{0},
                             is_first() ? kVerdict : kReport, timeout_);
  std::exception_ptr error;
  std::string what;
  try {
    body();
  } catch (const Aborted&) {
    throw;  // the other processes no longer listen
  } catch (const std::exception& e) {
    error = std::current_exception();
    what = *e.what() == '\0' ? "an error" : e.what();
  }
  std::string verdict;
  if (is_first()) {
    if (error) verdict = concat("process 0: ", what);
    for (int process = 1; process < count_; ++process) {
      const std::string report = receive_text(*transport_, process, kReport, timeout_);
      if (verdict.empty() && !report.empty()) verdict = concat("process ", process, ": ", report);
    }
    beats.reset();
    for (const int process : others) transport_->isend(process, kVerdict, {text_bytes(verdict)});
  } else {
    beats.reset();
    transport_->isend(0, kReport, {text_bytes(what)});
    verdict = receive_text(*transport_, 0, kVerdict, timeout_);
  }
  transport_->flush(timeout_);
  // If there are several errors, the first process's counts, because the others may result from it.
  if (error && verdict.starts_with(concat("process ", index_, ": "))) std::rethrow_exception(error);
  if (!verdict.empty()) throw Aborted(verdict);
}

std::vector<bool> Processes::writes(const std::vector<std::string>& names) const {
  std::vector<bool> mine(names.size(), true);
  if (count_ == 1) return mine;
  const std::vector<std::string> all = to_first(json(names).dump());
  json held_before = json::array();  // by process: the names that an earlier process also has
  std::set<std::string> known;
  for (const std::string& text : all) {
    const auto here = json::parse(text).get<std::set<std::string>>();  // ranks of a process may share a name
    json& held = held_before.emplace_back(json::array());
    for (const std::string& name : here) {
      if (!known.insert(name).second) held.push_back(name);
    }
  }
  held_before = json::parse(from_first(held_before.dump()));
  const auto others = held_before.at(index_).get<std::set<std::string>>();
  for (size_t i = 0; i < names.size(); ++i) mine[i] = !others.contains(names[i]);
  return mine;
}

void Processes::throw_if_aborted() const {
  if (count_ == 1) return;
  Values nothing;
  transport_->try_receive((index_ + 1) % count_, {.kind = MessageKind::kNone}, nothing);
}

}  // namespace twobp
