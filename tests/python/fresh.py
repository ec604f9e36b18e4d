"""Runs scripts in new processes that need not import torch, which takes seconds: forks of a server that has done nothing else."""
import contextlib
import gc
import importlib.util
import json
import multiprocessing
import os
import pathlib
import runpy
import socket
import sys
import threading
import time

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([name for name in (
    "torch", "torch.export", "torch._dynamo", "networkx", "sympy.combinatorics", "transformers.modeling_utils", "twobp")
    if importlib.util.find_spec(name.partition(".")[0])])


def start(script, *arguments, said, cwd=None, **environment):
    """Starts a process that writes its output to the file `said`."""
    process = CONTEXT.Process(target=_main, args=(str(script), [str(one) for one in arguments], said, cwd, environment))
    process.start()
    return process


def _main(script, arguments, said, cwd, environment):
    with open(said, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    if cwd is not None:
        os.chdir(cwd)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(pathlib.Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        gc.collect()  # a process of multiprocessing ends without it, and its trainers without a word to the other ranks


def finish(processes, timeout):
    """Returns the exit codes of the processes, and None for one that was killed after `timeout` seconds."""
    end = time.monotonic() + timeout
    for process in processes:
        process.join(max(0, end - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


def run(script, folder, *arguments, cwd=None, timeout=240):
    """Raises AssertionError with what the script printed unless it succeeds."""
    said = pathlib.Path(folder, "said.txt")
    code, = finish([start(script, *arguments, said=said, cwd=cwd)], timeout)
    assert code == 0, f"exit code {code}: {said.read_text()}"


def as_torchrun(rank, count, port):
    return {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def as_mpirun(rank, count, port):
    return {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank, "OMPI_COMM_WORLD_SIZE": count, "PMIX_NAMESPACE": f"{os.getpid()}@{port}"}


def run_ranks(count, script, folder, *arguments, launcher=as_torchrun, timeout=240):
    """Runs so many processes in the environment that the launcher makes. Returns their exit codes and outputs."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    files = [pathlib.Path(folder, f"said{rank}.txt") for rank in range(count)]
    codes = finish([start(script, *arguments, said=said, **{name: str(value) for name, value in launcher(rank, count, port).items()})
                    for rank, said in enumerate(files)], timeout)
    return codes, "".join(said.read_text() for said in files)


# A program that seems to be the Python interpreter for `-c SCRIPT ARGUMENT ...`: it lets a fork do the work on its own descriptors.
INTERPRETER = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [b" "], [0, 1, 2])
    server.sendall(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode() + b"\\n")
    sys.exit(int(server.makefile().readline()))
"""


@contextlib.contextmanager
def interpreter(folder):
    """Returns the path of such a program, for TWOBP_PYTHON."""
    address = str(pathlib.Path(folder, "fresh.socket"))
    path = pathlib.Path(folder, "fresh-python")
    path.write_text(INTERPRETER.format(python=sys.executable, address=address))
    path.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        threading.Thread(target=_serve, args=(listener,), daemon=True).start()
        yield str(path)
        listener.shutdown(socket.SHUT_RDWR)


def _serve(listener):
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        with client:
            process = CONTEXT.Process(target=_interpret, args=(client,))
            process.start()
            process.join()
            with contextlib.suppress(BrokenPipeError):
                client.sendall(f"{process.exitcode}\n".encode())


def _interpret(client):
    _, descriptors, *_ = socket.recv_fds(client, 1, 3)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    arguments, environment, cwd = json.loads(client.makefile().readline())
    sys.stdin = open(0, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    option, script, *rest = arguments
    assert option == "-c"
    sys.argv = [option, *rest]
    exec(script, {"__name__": "__main__"})
