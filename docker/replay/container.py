"""Runs what a Dockerfile made, as an engine would, and asks it whether all is well."""

import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import dockerfile


def contained(
    root: Path, setup: list[str], command: list[str], environment: dict[str, str], *, offline: bool = False
) -> list[str]:
    """The command line of a command in `root`, as process 1, after the shell's lines in `setup`. What they mount is gone
    with the process."""
    variables = [f"{name}={value}" for name, value in environment.items()]
    script = [
        "set -eu",
        *setup,
        f"mount --rbind /dev {shlex.quote(str(root / 'dev'))}",
        f"mount -t proc proc {shlex.quote(str(root / 'proc'))}",
        shlex.join(["exec", "env", "-i", *variables, "chroot", str(root), *command]),
    ]
    net = ["--net"] if offline else []
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", *net, "sh", "-c", "\n".join(script)]


class Container:
    """The last stage's program: process 1 as the image's user, a read-only root with a `/tmp`, `/models`, no network, no
    capabilities, no new privileges."""

    def __init__(
        self, root: Path, stage: dockerfile.Stage, environment: dict[str, str], models: Path, driver: Path | None
    ):
        user, _, group = stage.last("USER").text.partition(":")
        self.identity = ["--reuid", user, "--regid", group, "--clear-groups"]
        check = stage.last("HEALTHCHECK")
        self.health = dockerfile.Step(check.line, "CMD", {}, check.text.removeprefix("CMD").strip()).words()
        command = [*stage.last("ENTRYPOINT").words(), *stage.last("CMD").words()]
        self.environment = environment | {"HOME": "/", "HOSTNAME": "replay"}
        where = shlex.quote(str(root))
        setup = [f"mount --bind {where} {where}", f"mount --bind {shlex.quote(str(models))} {where}/models"]
        if driver:
            setup += [f"mkdir -p {where}/run/driver", f"mount --bind {shlex.quote(str(driver))} {where}/run/driver"]
            self.environment["LD_LIBRARY_PATH"] = "/run/driver"
        setup += [f"mount -o remount,ro,bind {where}", f"mount -t tmpfs tmpfs {where}/tmp", "ip link set lo up"]
        # setpriv is the image's, and becomes the program.
        limits = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        line = contained(root, setup, ["setpriv", *self.identity, *limits, *command], self.environment, offline=True)
        self.started = time.monotonic()
        self.outer = subprocess.Popen(line)

    def process(self) -> int:
        """The program's process, as the host counts."""
        outer = self.outer.pid
        return int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])

    def execute(self, command: list[str]) -> subprocess.CompletedProcess:
        """A command within, as `docker exec`."""
        enter = ["nsenter", "--target", str(self.process()), "--mount", "--pid", "--net", "--root"]
        line = [*enter, "setpriv", *self.identity, *command]
        return subprocess.run(line, env=self.environment, capture_output=True, text=True)

    def ask(self, port: str, **more) -> subprocess.Popen:
        """A question, from a process of the host that is in the program's network; its output is the answer, line by line."""
        body = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "epsilon": 0.1} | more
        line = ["nsenter", "--target", str(self.process()), "--net", sys.executable, "-c", ASK, port, json.dumps(body)]
        return subprocess.Popen(line, stdout=subprocess.PIPE, text=True)

    def end(self) -> None:
        """At once, if it has not ended by itself."""
        if self.outer.poll() is None:
            os.kill(self.process(), signal.SIGKILL)
            self.outer.wait()

    def wait_until_healthy(self, patience: float) -> None:
        while True:
            time.sleep(0.5)
            if self.outer.poll() is not None:
                sys.exit(f"the program ended with {self.outer.returncode}")
            asked = self.execute(self.health)
            waited = time.monotonic() - self.started
            if asked.returncode == 0:
                return logging.info("healthy after %.1f s, by %s", waited, shlex.join(self.health))
            if waited > patience:
                sys.exit(f"not healthy after {waited:.0f} s: {asked.stdout}{asked.stderr}")


ASK = """
import sys, urllib.request
port, body = sys.argv[1:]
request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body.encode())
request.add_header("Content-Type", "application/json")
for line in urllib.request.urlopen(request, timeout=120):
    print(line.decode().rstrip(), flush=True)
"""


def served(container: Container, port: str, patience: float) -> None:
    """Healthy, confined, one answer, and a drain that loses nothing."""
    container.wait_until_healthy(patience)
    status = Path(f"/proc/{container.process()}/status").read_text()
    facts = {name: value.split() for name, value in re.findall(r"^(\w+):\s*(.*)$", status, re.MULTILINE)}
    shown = {name: facts[name][-1] for name in ("NSpid", "Uid", "Gid", "CapEff", "CapBnd", "NoNewPrivs")}
    logging.info("process: %s", shown)
    if shown["NSpid"] != "1" or shown["Uid"] == "0" or int(shown["CapBnd"], 16) or shown["NoNewPrivs"] != "1":
        sys.exit("the program does not run as it should")

    said, _ = container.ask(port, max_tokens=24).communicate(timeout=120)
    answer = json.loads(said)["choices"][0]["message"]["content"]
    logging.info("answer: %r", answer)

    stream = container.ask(port, max_tokens=200, ignore_eos=True, stream=True)
    for _ in range(8):
        stream.stdout.readline()
    logging.info("SIGTERM, with a stream underway")
    began = time.monotonic()
    os.kill(container.process(), signal.SIGTERM)
    ready, alive = (container.execute([*container.health, *more]).returncode for more in (["--ready"], []))
    rest, _ = stream.communicate(timeout=120)
    code = container.outer.wait(timeout=60)
    took, chunks = time.monotonic() - began, rest.count("data: {")
    logging.info("while it drained: --ready ended with %d, the health check with %d", ready, alive)
    logging.info("%d more chunks came, and the program ended with %d after %.1f s", chunks, code, took)
    if not answer or not rest.rstrip().endswith("data: [DONE]") or code or alive or not ready:
        sys.exit("the server did not answer or did not drain as it should")
