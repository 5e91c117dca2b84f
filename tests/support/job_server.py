"""A server that forks processes to be killed. It has imported everything, so a process starts at once."""

import gc
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import traceback

LIMIT_SECONDS = 100


def serve(answer):
    """Read a job per line from standard input and write `answer(job)` for each. Call this after all imports."""
    import torch

    torch.set_num_threads(1)
    gc.collect()
    # Garbage collection would write to pages that the children share with the server.
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


def fork(work):
    """Run `work` in a new process and return its process id. Its exit status is 1 if `work` failed or took too long."""
    if child := os.fork():
        return child
    signal.alarm(LIMIT_SECONDS)
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def free_port():
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


class JobServer:
    """A process that runs the file of a subclass, which calls `serve`."""

    def __init__(self):
        words = [sys.executable, inspect.getfile(type(self))]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout.readline() == "ready\n"

    def ask(self, job):
        """Return the answer to a job. Both are values that JSON can hold."""
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        assert self._process.wait(LIMIT_SECONDS) == 0
        self._process.stdout.close()
