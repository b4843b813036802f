#!/usr/bin/env python3
"""Replays a Dockerfile's steps in a folder, then runs what comes of them as an engine would. For machines without a Docker
engine: no registry is asked for images (bases.py says what stands in for them), no daemon runs, nothing stays mounted.

    sudo docker/replay/replay.py docker/cpu.Dockerfile /var/tmp/replay

Each stage is a folder under FOLDER/stages, each cache mount one under FOLDER/caches; both are kept, so that a second run
takes up where the first was. A RUN has mounts and processes of its own, but is no prison: replay what you trust.

The result is started with the image's ENTRYPOINT and CMD as its USER: process 1, a read-only root, no network but its own
loopback, no capabilities. It has to become healthy by its own HEALTHCHECK, answer a question, finish a stream that is
underway when SIGTERM comes, and end with success.

Needs root, debootstrap, iproute2, Rust, and a network for packages and crates."""

import argparse
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

sys.dont_write_bytecode = True

import bases  # noqa: E402
from build import Build  # noqa: E402
from container import Container, served  # noqa: E402

TOOLS = "ar as c++ cargo cc clang cmake curl g++ gcc git ld make nvcc pip python3 rustc".split()


def looked_at(root: Path, path: str) -> None:
    """What the image weighs, that nothing in it compiles, and that what its program links is there."""
    du = subprocess.run(["du", "-sh", "--one-file-system", root], check=True, capture_output=True, text=True)
    logging.info("the image: %s in %s", *du.stdout.split())
    found = [tool for tool in TOOLS for folder in path.split(":") if (root / folder.lstrip("/") / tool).exists()]
    if found:
        sys.exit(f"not for an image that is shipped: {found}")
    linked = subprocess.run(["chroot", root, "ldd", "/usr/local/bin/taper"], capture_output=True, text=True)
    logging.info("the program links:\n%s%s", linked.stdout.rstrip(), linked.stderr)
    missing = {line.split()[0] for line in linked.stdout.splitlines() if "not found" in line}
    # The driver comes with the host.
    if linked.returncode or missing - {"libcuda.so.1"}:
        sys.exit(f"libraries that the image lacks: {missing}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument(
        "folder", type=Path, help="where everything is made: several GiB, on a disk that allows devices"
    )
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--mirror", help="source of Debian's packages [default: the host's]")
    parser.add_argument("--models", type=Path, help="folder to be /models [default: with the host's default model]")
    parser.add_argument("--device", help="instead of the image's TAPER_DEVICE, where there is no GPU: cpu")
    parser.add_argument("--patience", type=float, default=120, help="seconds that it may take to become healthy")
    args = parser.parse_args()
    if os.geteuid():
        sys.exit("replaying needs root: it mounts, and changes the root folder")
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
    began = time.monotonic()
    folder = args.folder.resolve()
    arguments = dict(pair.split("=", 1) for pair in args.build_arg)
    build = Build(args.dockerfile, folder, args.mirror or bases.mirror(), arguments)
    root, environment = build.run()
    logging.info("built in %.0f s", time.monotonic() - began)
    looked_at(root, environment["PATH"])

    models = args.models
    if models is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        models = folder / "models"
        (models / "taper").mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "--archive", "--update", cache / "taper/models", models / "taper"], check=True)
    driver = None
    if args.device:
        environment["TAPER_DEVICE"] = args.device
        # The program links the driver's library whether it is used or not.
        driver = next(folder.glob("bases/cuda-*/usr/local/cuda-*/lib/stubs"), None)
    last = build.stages[-1]
    container = Container(root, last, environment, models.resolve(), driver)
    try:
        served(container, last.last("EXPOSE").text, args.patience)
    finally:
        container.end()
    logging.info("done in %.0f s", time.monotonic() - began)


if __name__ == "__main__":
    main()
