"""One process of a mixture of experts trained by PyTorch and transformers, for experts_link.py: replicas under DDP,
whose experts are spread over the processes. Each (token, expert) row travels by all_to_all over Gloo to the process
of its expert, whose rows transformers' own experts compute. Gradients of experts need no sum; the others' are summed
once, after the last micro-batch (no_sync). It prints JSON: the seconds of each step, and the loss of the first."""

import argparse
import json
import os
import time

import numpy
import torch
import torch.distributed as dist
import transformers
from torch.nn.parallel import DistributedDataParallel


class Exchange(torch.autograd.Function):
    """Sends rows, `sends` of them to each process, and returns those that come."""

    @staticmethod
    def forward(ctx, rows, sends, receives, group):
        ctx.back = (receives, sends, group)
        received = rows.new_empty(sum(receives), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, *ctx.back), None, None, None


class SpreadExperts(torch.nn.Module):
    """In place of all experts of a layer. `own` has those of this process."""

    def __init__(self, own, group):
        super().__init__()
        self.own, self.group = own, group

    def forward(self, tokens, chosen, weights):
        processes, here = dist.get_world_size(), self.own.num_experts
        experts, order = chosen.flatten().sort(stable=True)
        counts = torch.bincount(experts, minlength=processes * here)
        of_others = torch.empty_like(counts)
        dist.all_to_all_single(of_others, counts, group=self.group)
        sends, receives = (one.view(processes, here).sum(1).tolist() for one in (counts, of_others))
        rows = Exchange.apply(tokens[order // chosen.shape[1]], sends, receives, self.group)
        local = torch.arange(here).repeat(processes).repeat_interleave(of_others)
        rows = self.own(rows, local.unsqueeze(1), torch.ones(len(local), 1))
        rows = Exchange.apply(rows, receives, sends, self.group) * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(tokens).index_add_(0, order // chosen.shape[1], rows)


def spread(model, group):
    """Leaves this process its experts. Returns their parameters by name."""
    rank, processes = dist.get_rank(), dist.get_world_size()
    for layer in model.model.layers:
        experts = layer.mlp.experts
        experts.num_experts //= processes
        for name in ("gate_up_proj", "down_proj"):
            whole = getattr(experts, name).detach()
            setattr(experts, name, torch.nn.Parameter(whole.chunk(processes)[rank].clone()))
        layer.mlp.experts = SpreadExperts(experts, group)
    return {name: one for name, one in model.named_parameters() if ".experts.own." in name}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    for name in ("--rank", "--micro-batches", "--samples", "--steps"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--master", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{options.master}:29511", rank=options.rank, world_size=2)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        os.path.join(options.folder, "model"), experts_implementation="grouped_mm"
    )
    own = spread(model, dist.new_group())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(own))
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01, fused=True)
    data = torch.from_numpy(numpy.load(os.path.join(options.folder, "data/input_ids.npy")))
    batch = 2 * options.micro_batches * options.samples
    seconds, first = [], None
    for step in range(options.steps):
        mine = data[step * batch : (step + 1) * batch].chunk(2)[options.rank].split(options.samples)
        dist.barrier()
        begin = time.perf_counter()
        loss = 0.0
        for i, ids in enumerate(mine):
            with replica.no_sync() if i + 1 < len(mine) else torch.enable_grad():
                of_part = replica(input_ids=ids, labels=ids).loss / len(mine)
                of_part.backward()
            loss += of_part.item()
        for parameter in own.values():
            parameter.grad /= 2  # DDP gives the others the mean
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
        if first is None:
            mean = torch.tensor([loss])
            dist.all_reduce(mean)
            first = mean.item() / 2
    if options.rank == 0:
        print(json.dumps({"seconds": seconds, "loss": first}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
