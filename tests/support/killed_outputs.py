"""Runs of `metaphrase generate` and its like that are killed, for the tests of what is resumed."""

import os
import resource
import signal
import time

from job_server import LIMIT_SECONDS, JobServer, fork, serve
from subcommands import execute


class Server(JobServer):
    """Runs commands, and kills them."""

    def run(self, words, output, *, most_bytes=None, seen_bytes=None):
        """Run a command and return its status: 0, or the negative number of the signal that ended it.

        It is ended in the middle of the write beyond `most_bytes`, or killed as soon as its output has `seen_bytes`.
        """
        job = {"words": words, "output": str(output), "most_bytes": most_bytes, "seen_bytes": seen_bytes}
        return self.ask(job)


def carry_out(job):
    from metaphrase.scripts import generate

    def work():
        if job["most_bytes"] is not None:
            generate.OutputFile = limited(generate.OutputFile, job["most_bytes"])
        execute(generate, job["words"])

    child, output, deadline = fork(work), job["output"], time.monotonic() + LIMIT_SECONDS
    while job["seen_bytes"] is not None and time.monotonic() < deadline:
        if os.path.exists(output) and os.path.getsize(output) >= job["seen_bytes"]:
            os.kill(child, signal.SIGKILL)
            break
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            break
        time.sleep(0.001)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def limited(open_file, most_bytes):
    """Opens an output in which the kernel ends the process in the middle of the write that would make it longer."""

    def open_limited(*arguments, **options):
        # What is said may go to a file, too.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
        return open_file(*arguments, **options)

    return open_limited


if __name__ == "__main__":
    from metaphrase.scripts import generate  # noqa: F401 (children find it imported)

    serve(carry_out)
