#!/usr/bin/env python3
"""Continues a text with a language model that twobp has saved, by transformers. If the folder has no tokenizer, the
tokens are bytes.

    scripts/generate.py runs/mine --prompt "In the beginning" --temperature 0.8 --top-p 0.9
"""

import argparse
import pathlib

import torch
import transformers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder that save.model wrote")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument("--tokens", type=int, default=64, help="largest number of new tokens")
    parser.add_argument("--temperature", type=float, default=1, help="0: always the likeliest token")
    parser.add_argument("--top-p", type=float, default=1, help="sample from the likeliest tokens of this probability")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model)
    has_tokenizer = pathlib.Path(options.model, "tokenizer.json").exists()
    if not has_tokenizer and model.config.vocab_size != 256:
        parser.error(f"{options.model} has no tokenizer.json, and {model.config.vocab_size} tokens are not the 256 bytes")
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model) if has_tokenizer else None
    ids = tokenizer(options.prompt)["input_ids"] if tokenizer else list(options.prompt.encode())
    how = {"do_sample": False}
    if options.temperature > 0:
        how = {"do_sample": True, "temperature": options.temperature, "top_p": options.top_p, "top_k": 0}
    prompt = torch.tensor([ids])
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=options.tokens, **how)[0].tolist()
    print(tokenizer.decode(out, skip_special_tokens=True) if tokenizer else bytes(out).decode(errors="replace"))


if __name__ == "__main__":
    main()
