#!/usr/bin/env python3
"""Runs the conformance suite of transports on processes that torch.distributed connects with Gloo.

    c10d_transport_test.py LIBRARY [PROCESSES [GOOGLETEST ARGUMENTS]]
"""
import ctypes
import os
import socket
import sys


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launch(library: str, processes: int, arguments: list[str]) -> int:
    import torch.distributed  # once: forks have it, and no thread has started yet

    os.environ.update(WORLD_SIZE=str(processes), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    children = []
    for rank in range(processes):
        if (child := os.fork()) == 0:
            os.environ["RANK"] = str(rank)
            if rank > 0:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.exit(run_rank(library, arguments))
        children.append(child)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children)


def run_rank(library: str, arguments: list[str]) -> int:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = [dist.new_group(range(size)) for size in range(1, dist.get_world_size() + 1)]
    names = [group.group_name.encode() if isinstance(group, dist.ProcessGroup) else b"" for group in groups]
    program = [b"c10d_transport_test", *(text.encode() for text in arguments)]
    tests = ctypes.CDLL(library)
    failed = tests.run_c10d_tests(len(names), (ctypes.c_char_p * len(names))(*names),
                                  len(program), (ctypes.c_char_p * (len(program) + 1))(*program))
    dist.barrier()
    dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 4, sys.argv[3:]))
