// The section `data` of the configuration.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "twobp/config/section.h"
#include "twobp/data/model_input.h"

namespace twobp {

struct DataConfig {
  std::string text;                // glob of plain text files, .jsonl or .parquet
  std::string field = "text";      // of the records of .jsonl and .parquet files
  std::string packing = "stream";  // of documents into samples: stream, none, split, whole
  std::string tokenizer;           // tokenizer.json, or a folder with one, for data.text;
                                   // empty: that of model.from if it has one, else tokens are bytes
  std::string cache;               // folder for tokenized text; empty: twobp in the user's cache folder
  bool end_of_text = true;         // the tokenizer's end-of-text token follows each document, if it has one
  std::string tokens;              // glob of token files: numbers of token_type one after the other, little-endian
  std::string token_type;          // uint16, uint32; empty: that of the files' headers, else uint16
  std::string arrays;              // folder with input_ids.npy or pixel_values.npy, and labels.npy
  std::string synthetic;           // "tokens", "images" or "vectors": seeded random input, for benchmarks
  int64_t sequence = 256;          // tokens
  bool shuffle = true;
  double held_out = 0.05;          // fraction of the samples kept for evaluation: of text from the end, of pictures
                                   // from each class, unless data.arrays/held_out has others
  int workers = 1;                 // threads that read batches ahead
  double mask_probability = 0.15;  // masked language models: fraction of the tokens to hide
  int64_t image_size = 0;          // pixels, height and width; 0: those of the arrays; 224 for synthetic ones
  std::string crop;                // none, shift, resized: see image_transform.h; empty: none
  int64_t padding = 4;             // pixels, of crop shift
  bool flip = false;               // mirrors pictures left to right with probability 1/2
  // `mean` is subtracted from a pixel (0 to 1), and the result is divided by `std`. Each has one value, or
  // one per channel. If empty: measured for bytes, none for floats.
  std::vector<double> mean;
  std::vector<double> std;
};

const Section& data_section();

// Checks that one source of data is set and that the model can read it; open_data checks the contents. Throws
// Error.
void check_data(const DataConfig& data, const ModelInput& model);

// The names of the keys that the source of data does not use for this model, whatever their values: "crop".
std::vector<std::string> unused_keys(const DataConfig& data, const ModelInput& model);
// Throws Error if one of them has another value than its default. Defaults are allowed, so that a fully
// printed configuration can be read again.
void check_used_keys(const DataConfig& data, const ModelInput& model);

// The tokenizer.json of data.text: the one that data.tokenizer names or, if it is empty, the one in the
// folder model.from. Empty if there is none; tokens are then bytes.
std::string tokenizer_of(const DataConfig& data, const ModelInput& model);

}  // namespace twobp
