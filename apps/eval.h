// `twobp eval`: held-out loss and perplexity of a model, on the pipeline.
#pragma once

namespace CLI {
class App;
}

namespace twobp {

void add_eval_command(CLI::App& app);

}  // namespace twobp
