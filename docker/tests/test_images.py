"""The Dockerfiles: sound, small in what they ship, alike in what they promise, and in step with the repository."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import bases
import pytest
from conftest import DOCKER, KINDS, ROOT, checked, image, stages
from dockerfile import ignored, patterns

each = pytest.mark.parametrize("kind", KINDS)


@each
def test_hadolint_has_nothing_to_say(kind):
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    command = [hadolint, "--no-color", "--config", DOCKER / "hadolint.yaml", DOCKER / f"{kind}.Dockerfile"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@each
def test_the_last_stage_ships_no_compiler_and_runs_as_nobody_special(kind):
    stage = image(kind)
    assert re.fullmatch(r"debian:\w+-slim", stage.base)
    installed = set()
    for step in stage.all("RUN"):
        for packages in re.findall(r"apt-get install ([^&|;]*)", step.text):
            installed |= {word for word in packages.split() if not word.startswith("-")}
            assert "--no-install-recommends" in packages
            assert "rm -rf /var/lib/apt/lists/*" in step.text
    assert installed <= {"ca-certificates", "libstdc++6"}
    for step in stage.all("COPY"):
        source = step.text.split()[0]
        assert source.startswith("/out/") if step.flags.get("from") else source.startswith("LICENSE"), step
    user, group = stage.last("USER").text.split(":")
    assert user.isdigit() and group.isdigit() and int(user) >= 10000 and stage.all("USER")[-1:] == stage.all("USER")
    # What the image's user may write to: the models, and nothing else.
    assert (
        f"install --directory --owner={user} --group={group} {stage.last('VOLUME').text}" in stage.all("RUN")[-1].text
    )


@each
def test_the_program_is_built_as_it_is_released(kind):
    (build,) = [step for stage in stages(kind) for step in stage.all("RUN") if "cargo build" in step.text]
    for part in ["--release", "--locked", "--package taper", "--strip"]:
        assert part in build.text
    assert ("--features cuda" in build.text) == (kind == "cuda")
    caches = [mount for mount in build.mounts() if mount["type"] == "cache"]
    assert {mount["target"] for mount in caches} == {"/usr/local/cargo/registry", "/src/target"}
    # A folder of objects that two images share would be built anew by each.
    assert {mount.get("id") for mount in caches} == {None, f"taper-{kind}"}


def test_both_images_are_used_alike():
    cpu, cuda = (image(kind) for kind in KINDS)
    for keyword in ["USER", "EXPOSE", "VOLUME", "HEALTHCHECK", "ENTRYPOINT", "CMD"]:
        assert [(s.flags, s.text) for s in cpu.all(keyword)] == [(s.flags, s.text) for s in cuda.all(keyword)]
    assert cpu.environment().items() <= cuda.environment().items()


@each
def test_the_program_accepts_the_images_environment_and_command(kind):
    stage = image(kind)
    command = [*stage.last("ENTRYPOINT").words(), *stage.last("CMD").words()]
    assert command[:2] == ["taper", "serve"]
    settings = checked(command[2:], stage.environment())
    assert settings["host"] == "0.0.0.0"
    assert str(settings["port"]) == stage.last("EXPOSE").text
    assert settings["device"] == kind
    assert stage.environment()["XDG_CACHE_HOME"] == stage.last("VOLUME").text


@each
def test_the_health_check_is_a_command_of_the_program(kind):
    check = image(kind).last("HEALTHCHECK")
    assert check.text == 'CMD ["taper", "health"]'
    help = subprocess.run([os.environ["TAPER"], "health", "--help"], capture_output=True, text=True)
    assert help.returncode == 0 and "--ready" in help.stdout, help.stderr


@each
def test_what_is_copied_is_there_and_not_left_out(kind):
    rules = patterns(ROOT)
    copied = [
        source
        for stage in stages(kind)
        for s in stage.all("COPY")
        if not s.flags.get("from")
        for source in s.text.split()[:-1]
    ]
    for source in copied:
        assert (ROOT / source).exists() and not ignored(rules, source), source
    # What the workspace is made of.
    assert {"Cargo.toml", "Cargo.lock", "crates", "configs"} <= set(copied)
    assert ("kernels" in copied) == (kind == "cuda")
    for secret in [
        ".git/config",
        "target/release/taper",
        "bench/needle.md",
        ".env",
        "models/model.safetensors",
        "docker/keys.toml",
    ]:
        assert ignored(rules, secret), secret


def test_toolchains_are_those_that_the_project_is_tested_with():
    oldest = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["rust-version"]
    versions = {
        re.match(r"rust:([\d.]+)-", stage.base)[1]
        for kind in KINDS
        for stage in stages(kind)
        if stage.base.startswith("rust:")
    }
    assert len(versions) == 1
    assert [int(part) for part in versions.pop().split(".")] >= [int(part) for part in oldest.split(".")]
    kernels = re.search(r"cuda-toolkit\[.*?\]==([\d.]+)", (ROOT / "scripts/cuda.sh").read_text())[1]
    (toolkit,) = [stage.base for stage in stages("cuda") if stage.base.startswith("nvidia/cuda:")]
    assert toolkit.startswith(f"nvidia/cuda:{kernels}-devel-")
    # The same folder wherever it is named.
    text = (DOCKER / "cuda.Dockerfile").read_text()
    assert set(re.findall(r"/usr/local/cuda[\w.-]*", text)) == {f"/usr/local/cuda-{kernels.rpartition('.')[0]}"}


@each
def test_base_images_are_pinned_and_can_be_replayed(kind):
    for stage in stages(kind):
        name, _, tag = stage.base.partition(":")
        assert tag and tag != "latest", stage.base
        assert "." not in name.split("/")[0], f"{stage.base}: a registry's host"
        assert bases.known(stage.base), f"{stage.base}: no stand-in in replay/bases.py"
