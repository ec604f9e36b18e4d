"""Peak resident memory of transformers.Trainer (fused AdamW) and of its drop-in with two ranks, each in a process of its own.

    drop_in_memory.py [llama smollm2] [--bf16]    llama: 44M parameters, vocabulary 32,000; smollm2: the shape of SmolLM2-135M
    drop_in_memory.py smollm2 --gradients streamed auto [--stash bf16] [--samples 1] [--length 128]
                                                  drop-ins on one rank of two threads; all without clipping
    drop_in_memory.py --kind drop-in smollm2      one of them: resident memory after each phase
"""
import argparse
import os
import subprocess
import sys

SHAPES = {"llama": dict(vocab_size=32000, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4),
          "smollm2": dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                          num_key_value_heads=3)}
MICRO_BATCHES, STEPS = 4, 3
GRADIENTS = ["kept", "streamed", "auto"]


def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) / 1024


def mark(what):
    print(f"{what:20s} now {status('VmRSS'):6.0f}   highest since the last line {status('VmHWM'):6.0f} MiB", flush=True)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def train(kind, model, options):
    os.environ["TWOBP_CACHE"] = "off"
    import torch
    import transformers
    transformers.logging.set_verbosity_error()
    if kind == "transformers":
        from transformers import Trainer
    else:
        from twobp.transformers import Trainer
    torch.set_num_threads(2)
    torch.manual_seed(0)
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(tie_word_embeddings=True, **SHAPES[model]))
    generator = torch.Generator().manual_seed(0)
    data = [{"input_ids": (ids := torch.randint(0, SHAPES[model]["vocab_size"], (options.length,), generator=generator)), "labels": ids}
            for _ in range(options.samples * MICRO_BATCHES * STEPS)]
    mark("the model")

    class Marks(transformers.TrainerCallback):
        def on_step_end(self, *arguments, **keywords):
            mark("a step")

    arguments = transformers.TrainingArguments("unused", use_cpu=True, report_to="none", per_device_train_batch_size=options.samples,
                                               gradient_accumulation_steps=MICRO_BATCHES, max_steps=STEPS, disable_tqdm=True, save_strategy="no",
                                               optim="adamw_torch_fused", bf16=options.bf16, max_grad_norm=0.0 if options.gradients else 1.0)
    own = {"ranks": 2, "schedule": "1f1b"} if kind == "drop-in" else {}
    if kind in GRADIENTS:
        own = {"ranks": 1, "threads": 2, "gradients": kind, "stash": options.stash}
    Trainer(module, arguments, train_dataset=data, callbacks=[Marks], **own).train()
    mark("trained")


def peak(kind, model):
    """The highest of all phases, in a process of its own."""
    output = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--kind", kind, "--model", model], check=True, stdout=subprocess.PIPE, text=True).stdout
    return max(int(line.split()[-2]) for line in output.splitlines() if line.endswith("MiB"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="llama|smollm2")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--gradients", nargs="+", default=[], choices=GRADIENTS)
    parser.add_argument("--stash", default="full", choices=["full", "bf16"])
    parser.add_argument("--samples", type=int, default=2, help="of a micro-batch")
    parser.add_argument("--length", type=int, default=128, help="of a sample, in tokens")
    parser.add_argument("--kind", choices=["transformers", "drop-in", *GRADIENTS])
    parser.add_argument("--model", choices=list(SHAPES))
    options = parser.parse_args()
    if options.kind:
        return train(options.kind, options.model or options.models[0], options)
    for model in options.models or SHAPES:
        theirs = peak("transformers", model)
        print(f"{model}, {options.samples} x {options.length} tokens: transformers {theirs} MiB", flush=True)
        for kind in options.gradients or ["drop-in"]:
            ours = peak(kind, model)
            print(f"  {kind} {ours} MiB, {ours / theirs:.2f}x", flush=True)


if __name__ == "__main__":
    main()
