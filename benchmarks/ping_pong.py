#!/usr/bin/env python3
"""Compares twobp's transports over MPI and over PyTorch's Gloo group with plain MPI and the plain group: the time of one direction by size, and of
a message whose sender computes.

    PYTHONPATH=build/release/python mpirun -n 2 .venv/bin/python benchmarks/ping_pong.py build/release/benchmarks/libping_pong.so [SECONDS PER SIZE]
"""
import ctypes
import os
import sys

import torch
import torch.distributed as dist

import twobp

if len(sys.argv) not in (2, 3) or sys.argv[1] in ("-h", "--help"):
    sys.exit(__doc__)
if os.environ.get("OMPI_COMM_WORLD_SIZE") != "2":
    sys.exit("ping_pong.py: start two processes with Open MPI's mpirun -n 2")
torch.set_num_threads(1)
twobp.init_process_group()
library = ctypes.CDLL(os.path.abspath(sys.argv[1]), mode=ctypes.RTLD_GLOBAL)
library.run_ping_pong(dist.group.WORLD.group_name.encode(), ctypes.c_double(float(sys.argv[2]) if len(sys.argv) > 2 else 1.0))
dist.destroy_process_group()
