"""What stands in for the images that a Dockerfile begins FROM, where no registry can be asked for them: Debian's own
packages, the host's Rust toolchain, and CUDA's Python packages."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Base:
    """A folder to begin from, what is mounted into it while steps run, and the environment that the image has."""

    root: Path
    mounts: dict[str, Path] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Of every part the same release: a newer nvvm or crt than nvcc makes PTX that ptxas rejects.
CUDA_PACKAGES = [
    "cuda-toolkit[nvcc,cudart,cublas,curand,nvrtc,crt,cccl]=={0}",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
]


def mirror() -> str:
    """The host's own source of Debian's packages."""
    sources = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("debian*"))]
    for text in (path.read_text() for path in sources if path.exists()):
        if match := re.search(r"^(?:URIs:|deb(?: \[.*?\])?)\s+(\S+)", text, re.MULTILINE):
            return match[1]
    sys.exit("no source of Debian's packages is known from /etc/apt: name one with --mirror")


def debian(folder: Path, source: str, suite: str, *, packages: str = "") -> Base:
    """The suite's smallest system. As in the slim images, there are no manuals and no translations."""
    root = folder / "-".join(filter(None, ["debian", suite, packages.replace(",", "-")]))
    if not (root / "ready").exists():
        shutil.rmtree(root, ignore_errors=True)
        include = [f"--include={packages}"] if packages else []
        subprocess.run(["debootstrap", "--variant=minbase", *include, suite, root, source], check=True)
        for unused in [
            "usr/share/doc",
            "usr/share/info",
            "usr/share/locale",
            "usr/share/man",
            "var/cache/apt",
            "var/lib/apt/lists",
        ]:
            shutil.rmtree(root / unused, ignore_errors=True)
        kept_out = "".join(f"path-exclude /usr/share/{name}/*\n" for name in ["doc", "info", "locale", "man"])
        (root / "etc/dpkg/dpkg.cfg.d/slim").write_text(kept_out)
        (root / "ready").touch()
    return Base(root, environment={"PATH": PATH})


def rust(folder: Path, source: str, version: str, suite: str) -> Base:
    """A system with a C compiler and the host's toolchain, which has to be of that version."""
    toolchain = Path(
        subprocess.run(["rustc", "--print", "sysroot"], check=True, capture_output=True, text=True).stdout.strip()
    )
    said = subprocess.run(["rustc", "--version"], check=True, capture_output=True, text=True).stdout.split()[1]
    if f"{said}.".split(".")[:2] != version.split(".")[:2]:
        sys.exit(f"the image has Rust {version}, this machine {said}")
    base = debian(folder, source, suite, packages="ca-certificates,gcc,libc6-dev")
    inside = "/usr/local/rustup/toolchains/host"
    environment = {"CARGO_HOME": "/usr/local/cargo", "PATH": f"/usr/local/cargo/bin:{inside}/bin:{PATH}"}
    return Base(base.root, {inside: toolchain}, environment)


def cuda(folder: Path, _source: str, version: str) -> Base:
    """Nothing but the toolkit, where the image has it, and a driver library to link against."""
    root = folder / f"cuda-{version}"
    if not (root / "ready").exists():
        shutil.rmtree(root, ignore_errors=True)
        made = root / "venv"
        subprocess.run([sys.executable, "-m", "venv", made], check=True)
        pip = [made / "bin/pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
        subprocess.run([*pip, *(package.format(version) for package in CUDA_PACKAGES)], check=True)
        home = root / f"usr/local/cuda-{version.rpartition('.')[0]}"
        home.parent.mkdir(parents=True)
        shutil.move(str(next(made.glob("lib/python3.*/site-packages/nvidia/cu13"))), home)
        shutil.rmtree(made)
        for library in list((home / "lib").glob("lib*.so.*")):
            # What the linker looks for.
            plain = library.with_name(library.name.partition(".so")[0] + ".so")
            plain.unlink(missing_ok=True)
            plain.symlink_to(library.name)
        (home / "lib64").unlink(missing_ok=True)
        (home / "lib64").symlink_to("lib")
        _driver(home)
        (root / "ready").touch()
    return Base(root)


def _driver(home: Path) -> None:
    """Every function of the driver by name, none of which does anything: as in `stubs` of NVIDIA's image."""
    header = (home / "include/cuda.h").read_text()
    names = set(re.findall(r"CUDAAPI\s+(cu\w+)\s*\(", header))
    names |= {name for pair in re.findall(r"#\s*define\s+(cu\w+)\s+(cu\w+)", header) for name in pair}
    names |= {name + ending for name in set(names) for ending in ("_v2", "_v3", "_v4", "_ptsz", "_ptds")}
    stubs = home / "lib/stubs"
    stubs.mkdir(exist_ok=True)
    source = "".join(f"int {name}(void) {{ return 1; }}\n" for name in sorted(names))
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", stubs / "libcuda.so"]
    subprocess.run(command, input=source, text=True, check=True)
    (stubs / "libcuda.so.1").symlink_to("libcuda.so")


# An image's name, and what makes its stand-in from the parts in parentheses.
TABLE: list[tuple[str, Callable[..., Base]]] = [
    (r"debian:(\w+)-slim", debian),
    (r"rust:([\d.]+)-slim-(\w+)", rust),
    (r"nvidia/cuda:([\d.]+)-devel-ubuntu24\.04", cuda),
]


def known(image: str) -> bool:
    """Whether an image has a stand-in."""
    return any(re.fullmatch(pattern, image) for pattern, _ in TABLE)


def make(image: str, folder: Path, source: str) -> Base:
    """The stand-in for an image, made in `folder` if it is not there."""
    for pattern, maker in TABLE:
        if match := re.fullmatch(pattern, image):
            folder.mkdir(parents=True, exist_ok=True)
            return maker(folder, source, *match.groups())
    sys.exit(f"no stand-in is known for the image {image}: see TABLE in {__file__}")
