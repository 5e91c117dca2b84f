"""Runs of `metaphrase generate` that are killed: each in a process of its own, forked from one that has imported everything."""

import gc
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback

LIMIT_SECONDS = 100


def serve():
    """Reads a job from each line: the words of the command, and where it is killed; answers how its process ended."""
    import torch

    from metaphrase.scripts import generate

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            carry_out(generate, job)
        if job["seen_bytes"] is not None:
            kill_when_seen(child, job["output"], job["seen_bytes"])
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def carry_out(generate, job):
    """Runs the command. The kernel ends it in the middle of the write that would make the output longer than so many bytes."""
    signal.alarm(LIMIT_SECONDS)
    whole = generate.open_output

    def open_limited(*arguments):
        # What is said may go to a file, too.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["most_bytes"], job["most_bytes"]))
        return whole(*arguments)

    if job["most_bytes"] is not None:
        generate.open_output = open_limited
    try:
        generate.main(job["words"])
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def kill_when_seen(child, output, seen_bytes):
    """Kills a process as soon as its output has so many bytes."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        if os.path.exists(output) and os.path.getsize(output) >= seen_bytes:
            break
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)


class Server:
    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "ready\n"

    def run(self, words, output, *, most_bytes=None, seen_bytes=None):
        """Runs a command and returns its status: 0, or the negative number of the signal that ended it."""
        job = {"words": words, "output": str(output), "most_bytes": most_bytes, "seen_bytes": seen_bytes}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait(LIMIT_SECONDS)


if __name__ == "__main__":
    serve()
