"""Processor time of the commands that compute nothing: median of five starts, in seconds."""

import os
import resource
import statistics
import subprocess
import sys

COMMANDS = (["--version"], ["--help"], ["run", "--help"], ["models"])


def processor_time(arguments: list[str]) -> float:
    """User and system time of one start."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "anchorlens", *arguments],
        stdout=subprocess.DEVNULL,
        check=True,
        env=os.environ,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    for command in COMMANDS:
        median = statistics.median(processor_time(command) for _ in range(5))
        print(f"anchorlens {' '.join(command):12} {median:.2f} s")
