"""Times PyTorch autograd on one layer of each kind, for comparison with I + W of twobp's own layers.

Prints JSON: per kind the median seconds of the forward and of the whole backward (with respect to the input and to
the weights) on one pinned thread, fp32. Gradients are None before every backward, outside of the timing.

    python layer_backward.py --dim 512 --hidden 1408 --sequence 256
"""
import argparse
import json
import os
import statistics
import sys
import time

try:
    import torch
except ImportError:
    sys.exit(f"layer_backward.py: no torch in {sys.executable}; run it with a Python that has torch==2.13.0")

import llama


def make_layers(args):
    """kind -> (parameters' module, function of the input, input, gradient of the output)"""
    shape = (args.micro_batch_size, args.sequence)
    tokens, labels = torch.randint(args.vocab, shape), torch.randint(args.vocab, shape)

    def hidden_state():
        return torch.randn(*shape, args.dim)

    attention = llama.AttentionHalf(args.dim, args.heads, args.sequence)
    mlp = llama.MlpHalf(args.dim, args.hidden)
    embedding = llama.make_embedding(args.dim, args.vocab)
    head = llama.make_head(args.dim, args.vocab)
    return {
        "attention": (attention, attention, hidden_state().requires_grad_(), hidden_state()),
        "mlp": (mlp, mlp, hidden_state().requires_grad_(), hidden_state()),
        "embedding": (embedding, embedding, tokens, hidden_state()),
        "head": (head, lambda x: llama.loss_function(head(x), labels), hidden_state().requires_grad_(),
                 torch.ones(())),
    }


def time_layer(module, function, layer_input, output_gradient, repeats, warmup):
    forward, backward = [], []
    for _ in range(warmup + repeats):
        module.zero_grad(set_to_none=True)
        layer_input.grad = None
        begin = time.perf_counter()
        output = function(layer_input)
        middle = time.perf_counter()
        output.backward(output_gradient)
        end = time.perf_counter()
        forward.append(middle - begin)
        backward.append(end - middle)
        del output
    forward, backward = forward[warmup:], backward[warmup:]
    return {"forward_seconds": statistics.median(forward), "backward_seconds": statistics.median(backward),
            "forward_seconds_range": [min(forward), max(forward)],
            "backward_seconds_range": [min(backward), max(backward)]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    llama.add_size_options(parser)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5, help="repeats that are not counted")
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    torch.manual_seed(1)
    layers = {kind: time_layer(*layer, args.repeats, args.warmup) for kind, layer in make_layers(args).items()}
    print(json.dumps({"torch": torch.__version__, "sizes": vars(args), "layers": layers}, indent=2))


if __name__ == "__main__":
    main()
