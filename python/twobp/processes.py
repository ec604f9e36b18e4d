"""Connects the processes of a run, whatever launcher started them."""

from __future__ import annotations

import datetime
import os
import time
import zlib
from typing import Any

import torch
import torch.distributed

from twobp import _native, checks
from twobp._native import Error

MOST_NAMED = 8  # ranks in an error
REFUSAL = 0.5  # seconds that rank 0's store lives on, so that the others can see who is missing
FIRST_PORT, PORTS = 20000, 12000  # below the ports that systems give to outgoing connections


def init_process_group(timeout: float = 600.0) -> int:
    """Connects the processes that torchrun, mpirun or srun started, through torch.distributed with Gloo, and returns
    their number. Does nothing in a process that is alone or already connected.

    Processes on several hosts need MASTER_ADDR, the address of process 0, which torchrun sets. `timeout` is the time in
    seconds that a process waits for the others. Raises twobp.Error if the launcher's variables contradict each other,
    or if an address is needed, and names the ranks that have not come in time."""
    timeout = checks.number(timeout, "timeout", least=1e-3)
    launcher = _native.find_launcher()
    if not torch.distributed.is_initialized() and launcher["size"] > 1:
        address = launcher["master_address"]
        if not address and launcher["local_rank"] != launcher["rank"]:
            raise Error(
                f"process {launcher['rank']} runs on another host than process 0: set MASTER_ADDR to the address of "
                "process 0's host, for all processes"
            )
        place = {
            "RANK": launcher["rank"],
            "WORLD_SIZE": launcher["size"],
            "LOCAL_RANK": launcher["local_rank"],
            "MASTER_ADDR": address or "127.0.0.1",
            "MASTER_PORT": launcher["master_port"] or _port(),
        }
        os.environ.update(
            {name: str(value) for name, value in place.items()}
        )  # as torchrun does, for libraries that read them there
        store = _meet(place, timeout)
        torch.distributed.init_process_group(
            "gloo",
            store=store,
            rank=place["RANK"],
            world_size=place["WORLD_SIZE"],
            timeout=datetime.timedelta(seconds=timeout),
        )
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _meet(place: dict[str, Any], timeout: float) -> torch.distributed.Store:
    """Returns the store at which all processes have come. It is that of torchrun if there is one, otherwise rank
    0's."""
    rank, size, name = place["RANK"], place["WORLD_SIZE"], f"{place['MASTER_ADDR']}:{place['MASTER_PORT']}"
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    end = time.monotonic() + timeout
    try:
        store: torch.distributed.Store = torch.distributed.TCPStore(
            place["MASTER_ADDR"],
            int(place["MASTER_PORT"]),
            size,
            is_master=rank == 0 and not hosted,
            timeout=datetime.timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as error:
        if rank == 0 and not hosted:
            raise Error(f"rank 0 cannot listen at {name}: {error}") from None
        raise Error(
            f"rank {rank} got no answer from rank 0 at {name} within {timeout:g} s: check that rank 0 has started "
            f"there, and that MASTER_ADDR and MASTER_PORT are right ({error})"
        ) from None
    store = torch.distributed.PrefixStore(f"twobp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    store.set(f"came/{rank}", "")
    missing = list(range(size))
    while missing := [other for other in missing if not store.check([f"came/{other}"])]:
        if time.monotonic() > end:
            ranks = (
                f"rank {missing[0]}"
                if len(missing) == 1
                else f"ranks {', '.join(map(str, missing[:MOST_NAMED]))}{', ...' if len(missing) > MOST_NAMED else ''}"
            )
            if rank == 0 and not hosted:
                time.sleep(REFUSAL)
            raise Error(
                f"{ranks} of {size} did not connect to {name} within {timeout:g} s: check that they have started"
            )
        time.sleep(0.01)
    return store


def check_loading(device: str) -> None:
    """Raises Error if kernels of this process's GPU are loaded on first use. Such a load waits for transfers, and these
    wait for other processes."""
    if device == "cuda" and torch.cuda.is_initialized() and os.environ.get("CUDA_MODULE_LOADING") != "EAGER":
        raise Error(
            "CUDA was used before the trainer was made, so that its kernels are loaded on first use, which can wait "
            "for other processes forever: set CUDA_MODULE_LOADING=EAGER for all processes, or make the trainer first"
        )


def _port() -> int:
    """Returns a port that is the same for all processes of a job, and hardly ever the same for two jobs."""
    job = (
        os.environ.get("PMIX_NAMESPACE")
        or os.environ.get("SLURM_JOB_ID", "") + os.environ.get("SLURM_STEP_ID", "")
        or str(os.getppid())
    )
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS
