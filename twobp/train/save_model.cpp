#include "twobp/train/save_model.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/train/build_model.h"

namespace twobp {
namespace {

using nlohmann::json;

// A file that appears under its name only when commit() has put all of it on the disk.
class NewFile {
 public:
  explicit NewFile(std::filesystem::path path) : path_(std::move(path)), aside_(path_.string() + ".new") {
    fd_ = ::open(aside_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    check(fd_ >= 0, "create");
  }
  ~NewFile() {
    if (fd_ >= 0) ::close(fd_);
    if (!committed_) ::unlink(aside_.c_str());
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(const void* data, size_t bytes) {
    const char* at = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t written = ::write(fd_, at, bytes);
      if (written < 0 && errno == EINTR) continue;
      check(written > 0, "write");
      at += written;
      bytes -= static_cast<size_t>(written);
    }
  }

  void commit() {
    check(::fsync(fd_) == 0, "sync");
    check(::close(std::exchange(fd_, -1)) == 0, "close");
    check(::rename(aside_.c_str(), path_.c_str()) == 0, "rename");
    committed_ = true;
  }

 private:
  void check(bool ok, const char* what) const {
    TWOBP_CHECK(ok, "cannot ", what, " ", aside_.string(), ": ", std::strerror(errno));
  }

  std::filesystem::path path_;
  std::filesystem::path aside_;
  int fd_ = -1;
  bool committed_ = false;
};

json model_json(const ModelConfig& config, int64_t sequence) {
  const int64_t kv_heads = config.kv_heads > 0 ? config.kv_heads : config.heads;
  const int64_t head_dim = config.head_dim > 0 ? config.head_dim : config.dim / config.heads;
  return {{"architectures", {"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"hidden_size", config.dim},
          {"num_hidden_layers", config.layers},
          {"num_attention_heads", config.heads},
          {"num_key_value_heads", kv_heads},
          {"head_dim", head_dim},
          {"intermediate_size", mlp_width(config)},
          {"vocab_size", config.vocab},
          {"rms_norm_eps", config.norm_eps},
          {"rope_theta", config.rope_theta},
          {"tie_word_embeddings", config.tied},
          {"max_position_embeddings", sequence},
          {"hidden_act", "silu"},
          {"attention_bias", false},
          {"mlp_bias", false},
          {"torch_dtype", "float32"}};
}

}  // namespace

void save_model(const std::string& directory, const ModelConfig& config, int64_t sequence,
                const std::vector<Parameter*>& weights) {
  TWOBP_CHECK(config.type == "llama", "only models of type llama can be saved, this one is '", config.type,
              "'");
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  TWOBP_CHECK(!error, "cannot create the folder ", directory, ": ", error.message());

  json header = json::object();
  header["__metadata__"] = {{"format", "pt"}};
  std::vector<at::Tensor> tensors;
  int64_t offset = 0;
  for (const Parameter* weight : weights) {
    int64_t row = 0;
    for (const ParameterPart& part : weight->parts()) {
      tensors.push_back(weight->value.narrow(0, row, part.rows).contiguous());
      row += part.rows;
      const at::Tensor& tensor = tensors.back();
      TWOBP_CHECK(tensor.scalar_type() == at::kFloat, "only float32 weights can be saved");
      const auto bytes = static_cast<int64_t>(tensor.nbytes());
      header[part.name] = {
          {"dtype", "F32"}, {"shape", tensor.sizes().vec()}, {"data_offsets", {offset, offset + bytes}}};
      offset += bytes;
    }
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // data begins aligned

  const std::filesystem::path folder(directory);
  NewFile data(folder / "model.safetensors");
  const auto length = static_cast<uint64_t>(text.size());  // little-endian, as all machines this runs on
  data.write(&length, sizeof(length));
  data.write(text.data(), text.size());
  for (const at::Tensor& tensor : tensors) data.write(tensor.const_data_ptr(), tensor.nbytes());
  NewFile description(folder / "config.json");
  const std::string config_text = model_json(config, sequence).dump(2) + "\n";
  description.write(config_text.data(), config_text.size());
  data.commit();
  description.commit();
}

}  // namespace twobp
