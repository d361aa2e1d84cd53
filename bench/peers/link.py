"""A child process that answers each line with a line of JSON, within a time limit.

Only processes started here are ended, by their own id (each leads a process group of its own)."""

import json
import os
import queue
import signal
import subprocess
import threading
import time


class Died(Exception):
    """The child ended, hung or answered nonsense; the text says which."""


class Link:
    def __init__(self, name, command, environment, cpus, log_file):
        self.name, self.cpus = name, cpus
        self.started = time.monotonic()
        self.log = open(log_file, "ab")
        self.log_file, self.ended = log_file, False
        self.process = subprocess.Popen(
            [str(c) for c in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        )
        self.lines = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def ask(self, line, limit):
        """Sends a line (text, or an object as JSON) and returns the JSON object of the answer."""
        if not isinstance(line, str):
            line = json.dumps(line)
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise self._died("ended") from None
        return self.answer(limit)

    def answer(self, limit):
        try:
            line = self.lines.get(timeout=limit)
        except queue.Empty:
            raise self._died(f"gave no answer within {limit} s") from None
        if line is None:
            raise self._died("ended")
        try:
            return json.loads(line)
        except ValueError:
            raise self._died(f"answered {line[:200]!r}") from None

    def _died(self, what):
        self.end()
        tail = open(self.log_file, "rb").read()[-300:].decode(errors="replace").strip().replace("\n", " / ")
        return Died(f"{self.name} {what} (exit code {self.process.returncode}): {tail}")

    def pin(self):
        """The main thread on the first CPU, the others on the remaining ones: as a pool of that size would lie.
        With more than two threads the system spreads the others."""
        first, rest = self.cpus[:1], self.cpus[1:] or self.cpus[:1]
        for task in os.listdir(f"/proc/{self.process.pid}/task"):
            try:
                os.sched_setaffinity(int(task), first if int(task) == self.process.pid else rest)
            except OSError:
                pass  # a thread that has just ended

    def peak_mib(self):
        """Peak resident memory of the child and all below it, in MiB."""
        return sum(_status(p, "VmHWM") for p in tree(self.process.pid)) / 1024

    def end(self):
        """Asks it to end by closing its input, then ends its process group; once."""
        if self.ended:
            return
        self.ended = True
        if self.process.stdin and not self.process.stdin.closed:
            try:
                self.process.stdin.close()
            except OSError:
                pass
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            pass
        # What it started belongs to its group too and may outlive it.
        self._signal(signal.SIGKILL)
        self.process.wait(timeout=5)
        self.log.close()

    def _signal(self, which):
        try:
            os.killpg(self.process.pid, which)
        except ProcessLookupError:
            pass


def tree(pid):
    """The process and all below it."""
    found = [pid]
    for p in found:
        try:
            for task in os.listdir(f"/proc/{p}/task"):
                found += map(int, open(f"/proc/{p}/task/{task}/children").read().split())
        except OSError:
            pass
    return found


def _status(pid, field):
    try:
        for line in open(f"/proc/{pid}/status"):
            if line.startswith(field):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def cpu_seconds():
    """Processor time that the whole machine has used, in seconds."""
    v = [int(x) for x in open("/proc/stat").readline().split()[1:9]]
    return (sum(v) - v[3] - v[4]) / os.sysconf("SC_CLK_TCK")


class Meanwhile:
    """How many cores processes that aren't ours used since this was made."""

    def __init__(self, links):
        self.links = links
        self.start = self._now()

    def _now(self):
        mine = os.times()
        ours = mine.user + mine.system + mine.children_user + mine.children_system
        return time.monotonic(), cpu_seconds(), ours + sum(tree_seconds(x.process.pid) for x in self.links)

    def cores(self):
        wall, all_, ours = (b - a for a, b in zip(self.start, self._now()))
        return max(0.0, (all_ - ours) / wall)


def tree_seconds(pid):
    """Processor time of a process and all below it, in seconds."""
    total = 0
    for p in tree(pid):
        try:
            fields = open(f"/proc/{p}/stat").read().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
        except OSError:
            pass
    return total / os.sysconf("SC_CLK_TCK")
