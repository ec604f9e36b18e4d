"""One run of a causal language model on PyTorch eager with one thread, for lora.py. It does full fine-tuning, or LoRA with PEFT. It prints one JSON line
per step."""
import argparse
import json
import time

import torch
import transformers


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--rank", type=int, default=0, help="0: full fine-tuning")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.config.use_cache = False
    if args.rank:
        import peft
        model = peft.get_peft_model(model, peft.LoraConfig(r=args.rank, lora_alpha=16, lora_dropout=0.0,
                                                           target_modules=["q_proj", "v_proj"]))
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    generator = torch.Generator().manual_seed(1)
    for _ in range(args.steps):
        batches = [torch.randint(model.config.vocab_size, (args.micro_batch_size, args.sequence), generator=generator)
                   for _ in range(args.micro_batches)]
        begin = time.perf_counter()
        total = 0.0
        for ids in batches:
            loss = model(input_ids=ids, labels=ids).loss / args.micro_batches
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(json.dumps({"step_seconds": time.perf_counter() - begin, "loss": total}), flush=True)


if __name__ == "__main__":
    main()
