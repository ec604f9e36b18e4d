"""Peak resident memory of transformers.Trainer (fused AdamW) and of its drop-in with two ranks, each in a process of its own.

    drop_in_memory.py [llama smollm2] [--bf16]     llama: 44M parameters, vocabulary 32,000; smollm2: the shape of SmolLM2-135M
    drop_in_memory.py smollm2 --streamed               streamed gradients on one rank of two threads; both without clipping
    drop_in_memory.py KIND MODEL [--bf16] --phases     KIND: transformers or drop-in; resident memory after each phase
"""
import os
import subprocess
import sys

SHAPES = {"llama": dict(vocab_size=32000, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4),
          "smollm2": dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                          num_key_value_heads=3)}
SAMPLES, LENGTH, MICRO_BATCHES, STEPS = 2, 128, 4, 3


def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) / 1024


def mark(what):
    print(f"{what:20s} now {status('VmRSS'):6.0f}   highest since the last line {status('VmHWM'):6.0f} MiB", flush=True)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def train(kind, model, *options):
    os.environ["TWOBP_CACHE"] = "off"
    import torch
    import transformers
    transformers.logging.set_verbosity_error()
    phases = mark if "--phases" in options else lambda what: None
    if kind == "drop-in":
        from twobp.transformers import Trainer
    else:
        from transformers import Trainer
    torch.set_num_threads(2)
    torch.manual_seed(0)
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(tie_word_embeddings=True, **SHAPES[model]))
    generator = torch.Generator().manual_seed(0)
    data = [{"input_ids": (ids := torch.randint(0, SHAPES[model]["vocab_size"], (LENGTH,), generator=generator)), "labels": ids}
            for _ in range(SAMPLES * MICRO_BATCHES * STEPS)]
    phases("the model")

    class Marks(transformers.TrainerCallback):
        def on_step_end(self, *arguments, **keywords):
            phases("a step")

    arguments = transformers.TrainingArguments("unused", use_cpu=True, report_to="none", per_device_train_batch_size=SAMPLES,
                                               gradient_accumulation_steps=MICRO_BATCHES, max_steps=STEPS, disable_tqdm=True, save_strategy="no",
                                               optim="adamw_torch_fused", bf16="--bf16" in options,
                                               max_grad_norm=0.0 if "--streamed" in options else 1.0)
    own = {"ranks": 2, "schedule": "1f1b"} if kind == "drop-in" else {}
    if own and "--streamed" in options:
        own = {"ranks": 1, "threads": 2, "gradients": "streamed"}
    Trainer(module, arguments, train_dataset=data, callbacks=[Marks], **own).train()
    phases("trained")
    if phases is not mark:
        print(round(status("VmHWM")))


def main(names):
    options = [one for one in names if one.startswith("--")]
    names = [one for one in names if not one.startswith("--")]
    if names and names[0] in ("transformers", "drop-in"):
        train(*names, *options)
        return
    for model in names or SHAPES:
        peaks = [int(subprocess.run([sys.executable, __file__, kind, model, *options], check=True, stdout=subprocess.PIPE, text=True)
                     .stdout.split()[-1]) for kind in ("transformers", "drop-in")]
        print(f"{model}: transformers {peaks[0]} MiB, drop-in {peaks[1]} MiB, {peaks[1] / peaks[0]:.2f}x", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
