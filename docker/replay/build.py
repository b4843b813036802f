"""Takes a Dockerfile's steps, one after the other, each in a folder of its stage."""

import logging
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import bases
import dockerfile
from container import contained

ROOT = Path(__file__).resolve().parents[2]
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


class Build:
    """A Dockerfile on its way."""

    def __init__(self, path: Path, folder: Path, source: str, arguments: dict[str, str]):
        self.folder, self.source = folder, source
        self.stages = dockerfile.read(path, arguments)
        self.patterns = dockerfile.patterns(ROOT)
        self.roots: dict[str, Path] = {}
        self.path = path

    def run(self) -> tuple[Path, dict[str, str]]:
        """All stages; the root and the environment of the last one."""
        for stage in self.stages:
            environment = self.stage(stage)
        return self.roots[stage.name], environment

    def stage(self, stage: dockerfile.Stage) -> dict[str, str]:
        logging.info(f"FROM {stage.base} AS {stage.name}")
        base = bases.make(stage.base, self.folder / "bases", self.source)
        if not stage.steps:
            self.roots[stage.name] = base.root
            return {}
        root = self.folder / "stages" / f"{self.path.stem}-{stage.name}"
        shutil.rmtree(root, ignore_errors=True)
        root.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "--archive", "--reflink=auto", base.root, root], check=True)
        (root / "ready").unlink()
        self.roots[stage.name] = root
        environment, place = dict(base.environment), "/"
        kinds = [step.keyword for step in stage.steps]
        if "USER" in kinds and {"COPY", "RUN", "WORKDIR"} & set(kinds[kinds.index("USER") :]):
            raise dockerfile.Unknown(
                f"{self.path}: stage {stage.name} has steps after USER, which would run as root here"
            )
        for step in stage.steps:
            logging.info(f"{self.path.name}:{step.line} {step.keyword} {' '.join(step.text.split())}")
            if step.keyword == "ENV":
                environment.update(dockerfile.pairs(dockerfile.expand(step.text, environment)))
            elif step.keyword == "WORKDIR":
                place = os.path.join(place, dockerfile.expand(step.text, environment))
                (root / place.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif step.keyword == "COPY":
                self.copy(step, root, place, environment)
            elif step.keyword == "RUN":
                self.command(step, root, place, base, environment)
        return environment

    def copy(self, step: dockerfile.Step, root: Path, place: str, environment: dict[str, str]) -> None:
        """From the build's folder, without what .dockerignore keeps out, or from a stage."""
        if set(step.flags) - {"from"} or step.words():
            raise dockerfile.Unknown(f"{self.path}:{step.line}: COPY {step.flags} {step.text}")
        *sources, target = dockerfile.expand(step.text, environment).split()
        other = step.flags.get("from")
        origin = self.roots[other[0]] if other else ROOT
        into = root / os.path.normpath(os.path.join(place, target)).lstrip("/")
        for source in sources:
            found = origin / source.lstrip("/")
            if not found.exists() or not other and dockerfile.ignored(self.patterns, source):
                sys.exit(f"{self.path}:{step.line}: {source} is not there, or .dockerignore keeps it out")
            if found.is_dir():
                shutil.copytree(found, into, symlinks=True, dirs_exist_ok=True, ignore=None if other else self.left_out)
            else:
                whole = into / found.name if target.endswith("/") or into.is_dir() else into
                whole.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(found, whole)

    def left_out(self, folder: str, names: list[str]) -> set[str]:
        inside = Path(folder).relative_to(ROOT)
        return {name for name in names if dockerfile.ignored(self.patterns, str(inside / name))}

    def command(
        self, step: dockerfile.Step, root: Path, place: str, base: bases.Base, environment: dict[str, str]
    ) -> None:
        """A RUN, with the host's names and certificates, so that package clients find their way out as they do here."""
        mounts = dict(base.mounts)
        mounts["/etc/resolv.conf"] = Path("/etc/resolv.conf")
        passed = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
        if CERTIFICATES.exists():
            mounts["/run/host-certificates.crt"] = CERTIFICATES
            passed |= dict.fromkeys(["SSL_CERT_FILE", "CARGO_HTTP_CAINFO"], "/run/host-certificates.crt")
        for mount in step.mounts():
            kind, target = mount["type"], mount["target"]
            if kind == "cache":
                mounts[target] = self.folder / "caches" / mount.get("id", target).strip("/").replace("/", "-")
                mounts[target].mkdir(parents=True, exist_ok=True)
            elif kind == "bind":
                mounts[target] = self.roots[mount["from"]] / mount["source"].lstrip("/")
            else:
                raise dockerfile.Unknown(f"{self.path}:{step.line}: a mount of type {kind}")
        setup, made = [], []
        for target, source in mounts.items():
            inside = root / target.lstrip("/")
            if not inside.exists():
                made.append(inside)
                inside.parent.mkdir(parents=True, exist_ok=True)
                inside.mkdir() if source.is_dir() else inside.touch()
            setup.append(shlex.join(["mount", "--bind", str(source), str(inside)]))
            if "/caches/" not in str(source):
                setup.append(shlex.join(["mount", "-o", "remount,ro,bind", str(inside)]))
        words = step.words() or ["/bin/sh", "-c", f"cd {shlex.quote(place)} && {step.text}"]
        began = time.monotonic()
        done = subprocess.run(contained(root, setup, words, environment | passed | {"HOME": "/root"}))
        for inside in reversed(made):
            inside.rmdir() if inside.is_dir() else inside.unlink()
        if done.returncode:
            sys.exit(f"{self.path}:{step.line}: the step ended with {done.returncode}")
        logging.info(f"  took {time.monotonic() - began:.0f} s")
