// A state machine over bytes.
#include "twobp/schedule/text/csv_cells.h"

#include <array>
#include <cstdint>

#include <climits>

#include "twobp/core/check.h"

namespace twobp {
namespace {

constexpr size_t kLongestCell = 4096;
constexpr int kEnd = -1;

// Reads bytes in blocks: istream::get is slow over hundreds of megabytes.
class Bytes {
 public:
  explicit Bytes(std::istream& in) : in_(in) {}

  int next() {
    if (at_ == size_) {
      in_.read(buffer_.data(), static_cast<std::streamsize>(buffer_.size()));
      size_ = static_cast<size_t>(in_.gcount());
      at_ = 0;
      if (size_ == 0) return kEnd;
    }
    return static_cast<unsigned char>(buffer_[at_++]);
  }
  int peek() {
    const int byte = next();
    if (byte != kEnd) --at_;
    return byte;
  }

 private:
  std::istream& in_;
  std::array<char, 1 << 16> buffer_{};
  size_t at_ = 0;
  size_t size_ = 0;
};

class Reader {
 public:
  Reader(std::istream& in, const std::string& name, const std::function<void(CsvPosition, const std::string&)>& visit)
      : bytes_(in), name_(name), visit_(visit) {}

  void run() {
    pass_byte_order_mark();
    for (int byte = bytes_.next(); byte != kEnd; byte = bytes_.next()) take(byte);
    check_closed();
    end_cell();
  }

 private:
  enum class State : uint8_t { kStart, kBare, kQuoted, kClosed };

  void pass_byte_order_mark() {
    const int first = bytes_.peek();
    TWOBP_CHECK(first != 0xFF && first != 0xFE, name_, ": is UTF-16, not plain text: save it as UTF-8");
    if (first != 0xEF) return;
    bytes_.next();
    const bool mark = bytes_.next() == 0xBB && bytes_.next() == 0xBF;
    TWOBP_CHECK(mark, name_, ": does not begin with text: a schedule is rows of cells such as 0F0,0F1");
  }

  void take(int byte) {
    TWOBP_CHECK(byte != 0, csv_place(name_, at_), ": a zero byte: this is not a text file");
    if (byte == '\n' || byte == '\r') {
      check_closed();
      if (byte == '\r' && bytes_.peek() == '\n') bytes_.next();
      end_cell();
      TWOBP_CHECK(at_.row < INT_MAX, name_, ": has more rows than can be counted");
      at_ = {at_.row + 1, 0};
      return;
    }
    switch (state_) {
      case State::kStart:
        if (byte == ' ' || byte == '\t') return;
        if (byte == '"') {
          state_ = State::kQuoted;
          return;
        }
        state_ = State::kBare;
        [[fallthrough]];
      case State::kBare:
        return byte == ',' ? next_cell() : add(byte);
      case State::kQuoted:
        if (byte != '"') return add(byte);
        if (bytes_.peek() != '"') {
          state_ = State::kClosed;
          return;
        }
        bytes_.next();
        return add(byte);
      case State::kClosed:
        if (byte == ' ' || byte == '\t') return;
        TWOBP_CHECK(byte == ',', csv_place(name_, at_), ", cell \"", text_,
                    "\": text behind the closing quote: put a comma between cells");
        return next_cell();
    }
  }

  void add(int byte) {
    TWOBP_CHECK(text_.size() < kLongestCell, csv_place(name_, at_), ": a cell of more than ", kLongestCell,
                " characters, which begins with \"", text_.substr(0, 24), "\": put commas between cells");
    text_ += static_cast<char>(byte);
  }

  void next_cell() {
    end_cell();
    TWOBP_CHECK(at_.column < INT_MAX, csv_place(name_, at_), ": the row has more cells than can be counted");
    ++at_.column;
  }

  void end_cell() {
    const size_t last = text_.find_last_not_of(" \t");
    text_.resize(last == std::string::npos ? 0 : last + 1);
    if (!text_.empty()) visit_(at_, text_);
    text_.clear();
    state_ = State::kStart;
  }

  void check_closed() const {
    TWOBP_CHECK(state_ != State::kQuoted, csv_place(name_, at_), ", cell \"", text_,
                "\": its quote is not closed in this row: add a double quote, or remove the first");
  }

  Bytes bytes_;
  const std::string& name_;
  const std::function<void(CsvPosition, const std::string&)>& visit_;
  State state_ = State::kStart;
  CsvPosition at_;
  std::string text_;
};

}  // namespace

std::string csv_place(const std::string& name, CsvPosition at) {
  return concat(name, ": row ", at.row + 1, " (rank ", at.row, "), column ", at.column + 1);
}

void read_csv_cells(std::istream& in, const std::string& name,
                    const std::function<void(CsvPosition, const std::string&)>& visit) {
  Reader(in, name, visit).run();
}

}  // namespace twobp
