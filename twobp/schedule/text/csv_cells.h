// Internal to this folder: the cells of a CSV file in order, in the format of RFC 4180 and Python's csv module.
#pragma once

#include <functional>
#include <istream>
#include <string>

namespace twobp {

struct CsvPosition {
  int row = 0;     // from 0
  int column = 0;  // from 0
};
// "mine.csv: row 2 (rank 1), column 7": both counted from 1.
std::string csv_place(const std::string& name, CsvPosition at);

// Calls visit(position, text) for every cell that is not empty, in order, without the blanks around it. Commas separate
// cells. LF, CR LF or CR end a row. A byte order mark is skipped. A cell may stand between double quotes; a quote
// inside it is written twice. Throws Error with the place for a quote that is not closed in its row, text after a
// closing quote, a cell of more than 4096 characters, and bytes that are not text. Memory does not grow with the file.
void read_csv_cells(std::istream& in, const std::string& name,
                    const std::function<void(CsvPosition, const std::string&)>& visit);

}  // namespace twobp
