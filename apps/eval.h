// `twobp eval`: held-out loss, perplexity and accuracy of a model, computed on the pipeline.
#pragma once

namespace CLI {
class App;
}

namespace twobp {

void add_eval_command(CLI::App& app);

}  // namespace twobp
