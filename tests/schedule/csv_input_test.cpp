// Tests wrong text forms. Each is refused with its place, its cell and advice. A random slip in a valid form
// is refused, or still runs.
#include <set>
#include <sstream>

#include <gtest/gtest.h>

#include "tests/schedule/support.h"
#include "twobp/core/text.h"
#include "twobp/schedule/check/validate.h"
#include "twobp/schedule/csv.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/passes.h"

namespace twobp::TWOBP_FILE {
namespace {

struct Wrong {
  std::string text;
  std::vector<std::string> says;  // besides the file's name
};

const std::string kOne = "0F0,0F1,0B0,0B1\n";                   // one rank
const std::string kTwo = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n";  // two

TEST(CsvInput, RefusesWithPlaceAndCell) {
  ASSERT_NO_THROW(from_csv(kOne, "mine.csv"));
  ASSERT_NO_THROW(from_csv(kTwo, "mine.csv"));
  const std::vector<Wrong> cases = {
      // no cells in the file
      {"", {"no cells", "0F0,0B0"}},
      {"\n\n,,\n", {"no cells"}},
      {std::string("0F0,\0F1\n", 9), {"not plain text"}},
      {"\xFF\xFE"
       "0",
       {"not plain text", "UTF-8"}},
      {"0F0,0B0\n\n1F0,1B0\n", {"row 2 (rank 1) has no cells", "Remove blank rows"}},
      {"\n0F0,0B0\n", {"row 1 (rank 0) has no cells"}},
      {"0F0,0B0\n1UNSHARD\n", {"row 2 (rank 1) has no cells"}},
      {"0F0,0B0" + std::string(1 << 20, '\n') + "1F0", {"row 2 (rank 1) has no cells"}},
      {"0F0,\"0B0", {"row 1 (rank 0), column 2", "cell \"\"0B0\"", "number of a stage"}},
      {"0F0," + std::string(5000, '1') + "\n", {"column 2", "stage is too large"}},
      // cells that have no meaning
      {"0F0,0X0\n", {"row 1 (rank 0), column 2", "cell \"0X0\"", "unknown op \"X\"", "did you mean", "RECV_B"}},
      {"0f0,0b0\n", {"cell \"0f0\"", "unknown op \"f\""}},
      {"0SEND_G0\n", {"cell \"0SEND_G0\"", "did you mean \"SEND_"}},
      {"F0,0B0\n", {"column 1", "cell \"F0\"", "number of a stage"}},
      {"0F0,-1B0\n", {"column 2", "cell \"-1B0\"", "number of a stage"}},
      {"rank 0\n", {"cell \"rank 0\"", "number of a stage", "0F0"}},
      {"0F0;0B0\n", {"cell \"0F0;0B0\"", "\";0B0\"", "comma"}},
      {"0\n", {"cell \"0\"", "unknown op \"\""}},
      {"0F,0B0\n", {"column 1", "cell \"0F\"", "no micro-batch", "0F0"}},
      {"0F0 0B0\n", {"cell \"0F0 0B0\"", "\" 0B0\"", "comma"}},
      {"0F0x,0B0\n", {"cell \"0F0x\"", "\"x\""}},
      {"0F99999999999999999999,0B0\n", {"cell \"0F99999999999999999999\"", "micro-batch is too large"}},
      {"0F2147483647,0B0\n", {"cell \"0F2147483647\"", "micro-batch is too large"}},
      {"99999999999999999999F0\n", {"cell \"99999999999999999999F0\"", "stage is too large"}},
      {"0F0,(0B0OVERLAP_F_B\n", {"column 2", "no closing parenthesis"}},
      {"0F0,(0B0)TOGETHER\n", {"column 2", "\"TOGETHER\"", "OVERLAP_F_B"}},
      {"0F0,(0B0;)OVERLAP_F_B\n", {"column 2", "cell \"(0B0;)OVERLAP_F_B\"", "number of a stage"}},
      // numbers that leave gaps
      {"0F2147483646,0B0\n", {"column 1", "cell \"0F2147483646\"", "too few cells", "without gaps"}},
      {"2000000000F0,0B0\n", {"column 1", "cell \"2000000000F0\"", "too few cells"}},
      {"0F0,0B0\n2F0,2B0\n", {"row 2 (rank 1), column 1", "cell \"2F0\"", "no stage 1"}},
      {"0F0,0F2,0B0,0B2\n", {"row 1 (rank 0)", "0F1 is missing"}},
      {"0F0,0F1,0B0,0B1\n1F0,1B0,1B1\n", {"row 2", "1B1 comes without 1F1"}},
      {"0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n", {"row 1 (rank 0)", "0F1 has no I or B"}},
      {"0F0,0F1,0I0,0W0,0I1\n", {"0I1 has no W"}},
      // a stage on two ranks
      {"0F0,0B0\n1F0,1B0,0F1\n",
       {"row 2 (rank 1), column 3", "cell \"0F1\"", "stage 0 is on rank 0 already, by 0F0 in row 1, column 1"}},
      // cells that are repeated or in the wrong order
      {"0F0,0F1,0F0,0B0,0B1\n", {"row 1 (rank 0), column 3", "cell \"0F0\"", "0F0 appears twice", ">0F0<"}},
      {"0F0,0B0,0I0,0W0\n", {"column 3", "cell \"0I0\"", "runs again"}},
      {"0B0,0F0\n", {"column 1", "cell \"0B0\"", "comes without 0F0", ">0B0<"}},
      {"0F0,0W0,0I0\n", {"column 2", "cell \"0W0\"", "comes without 0I0"}},
      {"0F0,0B0,1F0,1B0\n", {"column 2", "cell \"0B0\"", "1"}},
      // a cycle: rank 0 waits for the gradient of micro-batch 1, rank 1 for its forward
      {"0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", {"deadlock", "row ", "column ", "cell \""}},
  };
  for (const Wrong& wrong : cases) {
    const std::string message = error_of([&] { from_csv(wrong.text, "mine.csv"); });
    EXPECT_EQ(message.rfind("mine.csv", 0), 0U) << wrong.text << "\n" << message;
    expect_contains(message, wrong.says);
  }
}

// Messages contain only printable characters.
TEST(CsvInput, ControlCharactersStayOutOfMessages) {
  const std::string message = error_of([] { from_csv("0F0,\x1b[31mred\n", "mine.csv"); });
  EXPECT_EQ(message.find('\x1b'), std::string::npos) << message;
}

std::vector<std::vector<std::string>> cells_of(const std::string& text) {
  std::vector<std::vector<std::string>> rows;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) rows.push_back(split(line, ','));
  return rows;
}

std::string text_of_cells(const std::vector<std::vector<std::string>>& rows) {
  std::string text;
  for (const auto& row : rows) text += join(row, ",") + "\n";
  return text;
}

std::multiset<std::string> sorted(const std::vector<std::vector<std::string>>& rows) {
  std::multiset<std::string> cells;
  for (const auto& row : rows) cells.insert(row.begin(), row.end());
  return cells;
}

// The test drops, duplicates, swaps, moves or misspells a cell of a valid file. A lost or repeated cell is
// always refused by name. A swap may still give a schedule, which then has the same cells and runs.
TEST(CsvInput, MutationsAreRefusedOrStillSchedules) {
  Random random(3);
  int refused = 0;
  int still_valid = 0;
  const auto names = schedule_names();
  for (int i = 0; i < 3000; ++i) {
    const NamedSchedule& named = named_schedule(names[i % names.size()]);
    const int ranks = random_int(random, 1, 4);
    const int stages = ranks * usual_stages_per_rank(named.placement);
    const int micro_batches = random_int(random, 1, 8);
    if (!admits(named.name, stages, ranks, micro_batches)) continue;
    const Schedule schedule =
        make_schedule(named.name, stages, micro_batches, named.places_p2 ? P2Policy::kPlaced : P2Policy::kEnd, ranks);
    const auto original = cells_of(to_csv(schedule));
    auto rows = original;
    const int r = random_int(random, 0, static_cast<int>(rows.size()) - 1);
    auto& row = rows[r];
    const int at = random_int(random, 0, static_cast<int>(row.size()) - 1);
    const std::string cell = row[at];
    const int kind = random_int(random, 0, 4);
    std::string other = cell;
    switch (kind) {
      case 0:
        row.erase(row.begin() + at);
        break;
      case 1:
        row.insert(row.begin() + random_int(random, 0, static_cast<int>(row.size())), cell);
        break;
      case 2: {
        const int to = random_int(random, 0, static_cast<int>(row.size()) - 1);
        other = row[to];
        std::swap(row[at], row[to]);
        break;
      }
      case 3: {  // move to another rank
        auto& to = rows[random_int(random, 0, static_cast<int>(rows.size()) - 1)];
        to.insert(to.begin() + random_int(random, 0, static_cast<int>(to.size())), cell);
        rows[r].erase(std::find(rows[r].begin(), rows[r].end(), cell));
        break;
      }
      default:
        row[at][random_int(random, 0, static_cast<int>(cell.size()) - 1)] =
            "0123456789FIWB_;\"(x"[random_int(random, 0, 18)];
        other = row[at];
    }
    SCOPED_TRACE(concat(named.name, ", mutation ", kind, " of ", cell, " and ", other, " in row ", r + 1, ":\n",
                        text_of_cells(rows)));
    const std::string message = error_of([&] {
      const Schedule read = from_csv(text_of_cells(rows), "mutated");
      validate(add_communication(read));
      ++still_valid;
    });
    if (message.empty()) {
      const bool one_left = schedule.micro_batches == 1 && schedule.stages == 1;
      EXPECT_TRUE(one_left || kind == 4 || sorted(rows) == sorted(original));
      continue;
    }
    ++refused;
    EXPECT_EQ(message.rfind("mutated: row ", 0), 0U) << message;
    EXPECT_NE(message.find("column "), std::string::npos) << message;
    EXPECT_NE(message.find("cell \""), std::string::npos) << message;
  }
  EXPECT_GT(refused, 1000);
  EXPECT_GT(still_valid, 100);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
