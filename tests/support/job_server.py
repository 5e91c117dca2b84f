"""Jobs whose processes are killed: each is forked from a server that has imported everything, so that it starts at once."""

import gc
import json
import os
import signal
import subprocess
import sys
import traceback

LIMIT_SECONDS = 100


def serve(answer):
    """Reads jobs from standard input, one a line, and writes what `answer` says to each; to be called after all imports."""
    import torch

    torch.set_num_threads(1)
    gc.collect()
    # So that children do not copy what they only read.
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


def fork(work):
    """Starts a process that does the work and ends, with status 1 if that failed or took too long; returns its number."""
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


class JobServer:
    """A process that serves: it runs the file of a module that calls `serve`."""

    def __init__(self, file):
        self._process = subprocess.Popen(
            [sys.executable, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout.readline() == "ready\n"

    def ask(self, job):
        """The answer to a job; both are what JSON can say."""
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        assert self._process.wait(LIMIT_SECONDS) == 0
