"""What the images, the compose file and the manifests say, and what a real server (the program named by TAPER) exports."""

import json
import os
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path

import pytest
import yaml

DOCKER = Path(__file__).resolve().parents[1]
ROOT = DOCKER.parent
sys.path.insert(0, str(DOCKER / "replay"))
import dockerfile  # noqa: E402

KINDS = ["cpu", "cuda"]


def stages(kind):
    """The stages of an image."""
    return dockerfile.read(DOCKER / f"{kind}.Dockerfile")


def image(kind):
    """The stage of an image that is shipped."""
    return stages(kind)[-1]


def documents(path):
    """The documents of a YAML file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def merged(under, over):
    """`over` laid on `under`: objects key by key, lists of things with names by name, anything else in its place. Enough of
    a strategic merge for the patches here, and of what compose does with two files."""
    if isinstance(under, dict) and isinstance(over, dict):
        return under | {key: merged(under[key], value) if key in under else value for key, value in over.items()}
    named = [
        isinstance(part, list) and all(isinstance(item, dict) and "name" in item for item in part)
        for part in (under, over)
    ]
    if all(named):
        by_name = {item["name"]: item for item in under}
        for item in over:
            by_name[item["name"]] = merged(by_name.get(item["name"], {}), item)
        return list(by_name.values())
    return over


def rendered(folder):
    """What `kubectl kustomize` makes of a folder, by kind: of the fields that are used here, and no others."""
    kustomization = documents(folder / "kustomization.yaml")[0]
    used = {"apiVersion", "kind", "resources", "images", "patches", "configMapGenerator"}
    assert set(kustomization) <= used, f"{folder}: the tests do not know {set(kustomization) - used}"
    found = {}
    for name in kustomization["resources"]:
        path = (folder / name).resolve()
        more = rendered(path) if path.is_dir() else {one["kind"]: one for one in documents(path)}
        assert not set(found) & set(more), f"{folder}: two of a kind"
        found |= more
    for made in kustomization.get("configMapGenerator", []):
        data = {name: (folder / name).read_text() for name in made["files"]}
        found["ConfigMap"] = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": made["name"]}, "data": data}
    for patch in kustomization.get("patches", []):
        (change,) = documents(folder / patch["path"])
        assert change["metadata"]["name"] == found[change["kind"]]["metadata"]["name"], patch
        found[change["kind"]] = merged(found[change["kind"]], change)
    if images := {one["name"]: one for one in kustomization.get("images", [])}:
        for container in found["Deployment"]["spec"]["template"]["spec"]["containers"]:
            new = images.pop(container["image"])
            container["image"] = f"{new['newName']}:{new['newTag']}"
        assert not images, f"{folder}: images that no container has: {images}"
    return found


def checked(arguments, environment):
    """The settings that `taper serve` would have, by the program's own check."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("TAPER")}
    command = [os.environ["TAPER"], "config", "check", *arguments]
    done = subprocess.run(command, env=base | environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return tomllib.loads(done.stdout)


def flush_seconds():
    """How long clients may take to read the rest once all is answered, by the server's source."""
    source = (ROOT / "crates/taper-server/src/serve.rs").read_text()
    return int(source.split("const FLUSH: Duration = Duration::from_secs(")[1].split(")")[0])


class Server:
    """A server with the default model."""

    def __init__(self, address):
        self.address = address

    def get(self, path):
        """The body, or an error for any status but 200."""
        with urllib.request.urlopen(self.address + path, timeout=30) as answer:
            return answer.read().decode()

    def ask(self, **more):
        body = {
            "messages": [{"role": "user", "content": "Why is the sky blue?"}],
            "max_tokens": 12,
            "ignore_eos": True,
        } | more
        request = urllib.request.Request(self.address + "/v1/chat/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)


@pytest.fixture(scope="session")
def server():
    """A server that has answered once with everything that there is to count."""
    command = [os.environ["TAPER"], "serve", "--port", "0", "--kv-memory", "256MiB"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        greeting = process.stdout.readline()
        assert "http://" in greeting, greeting
        server = Server("http://" + greeting.strip().rpartition("http://")[2])
        draft = {"method": {"method": "streaming_llm", "window": 4}, "tokens": 2}
        server.ask(
            attention={
                "decode": {"method": "vattention", "epsilon": 0.1, "delta": 0.1},
                "audit": 1.0,
                "speculate": draft,
            }
        )
        yield server
    finally:
        process.terminate()
        assert process.wait(timeout=30) == 0
