// Internal to this folder: the cells of a CSV file, one after the other, as RFC 4180 and Python's csv module
// have them.
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

// Calls visit(position, text) for every cell that is not empty, in order, with blanks around it removed.
// Commas separate cells; LF, CR LF or CR end a row; a byte order mark is passed over; a cell may stand
// between double quotes, with a quote inside written twice. Throws Error, naming the place: a quote that is
// not closed in its row, text behind a closing quote, a cell of more than 4096 characters, bytes that are no
// text. Memory does not grow with the file.
void read_csv_cells(std::istream& in, const std::string& name,
                    const std::function<void(CsvPosition, const std::string&)>& visit);

}  // namespace twobp
