"""Reads a Dockerfile into stages and steps, for `replay.py` and the tests. Refuses what it does not know."""

import fnmatch
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

KEYWORDS = {
    "ARG",
    "CMD",
    "COPY",
    "ENTRYPOINT",
    "ENV",
    "EXPOSE",
    "FROM",
    "HEALTHCHECK",
    "LABEL",
    "RUN",
    "USER",
    "VOLUME",
    "WORKDIR",
}
VARIABLE = re.compile(r"\\\$|\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)")
PAIR = re.compile(r'(\w[\w.-]*)=("(?:[^"\\]|\\.)*"|(?:[^\s"\\]|\\.)*)')


class Unknown(Exception):
    """Something that this reader does not understand, with the file and the line."""


@dataclass
class Step:
    """One instruction: its flags (`--mount=…`) by name, each with all its values, and the rest of its text."""

    line: int
    keyword: str
    flags: dict[str, list[str]]
    text: str

    def words(self) -> list[str] | None:
        """The words of an exec form, or None if the text is a shell's."""
        return json.loads(self.text) if self.text.startswith("[") else None

    def mounts(self) -> list[dict[str, str]]:
        """What a RUN mounts, each as its options."""
        options = ([option.partition("=") for option in mount.split(",")] for mount in self.flags.get("mount", []))
        return [{name: value for name, _, value in each} for each in options]


@dataclass
class Stage:
    """From one FROM to the next."""

    name: str
    base: str
    steps: list[Step] = field(default_factory=list)

    def all(self, keyword: str) -> list[Step]:
        """The steps of one kind."""
        return [step for step in self.steps if step.keyword == keyword]

    def last(self, keyword: str) -> Step:
        """The step of a kind that counts in the end."""
        return self.all(keyword)[-1]

    def environment(self) -> dict[str, str]:
        """What its ENV steps come to."""
        known: dict[str, str] = {}
        for step in self.all("ENV"):
            known.update(pairs(expand(step.text, known)))
        return known


def expand(text: str, known: dict[str, str]) -> str:
    """Puts variables in; one that is not known is empty, or its default."""

    def value(match: re.Match) -> str:
        if match[0] == "\\$":
            return "$"
        return known.get(match[1] or match[3]) or match[2] or ""

    return VARIABLE.sub(value, text)


def pairs(text: str) -> dict[str, str]:
    """The names and values of an ENV, a LABEL or an ARG."""
    found = {name: re.sub(r"\\(.)", r"\1", value.strip('"')) for name, value in PAIR.findall(text)}
    if PAIR.sub("", text).strip():
        raise Unknown(f"{text!r}: not of the form NAME=value")
    return found


def read(path: Path, arguments: dict[str, str] | None = None) -> list[Stage]:
    """All stages of a file, with its ARGs before the first FROM put in; `arguments` are those of `--build-arg`."""
    known: dict[str, str] = {}
    stages: list[Stage] = []
    for step in _steps(path):
        where = f"{path}:{step.line}"
        if step.keyword == "FROM":
            match = re.fullmatch(r"(\S+)(?:\s+AS\s+(\S+))?", expand(step.text, known), re.IGNORECASE)
            if not match or step.flags:
                raise Unknown(f"{where}: FROM {step.text}")
            stages.append(Stage(match[2] or str(len(stages)), match[1]))
        elif stages:
            if step.keyword == "ARG":
                raise Unknown(f"{where}: ARG within a stage")
            stages[-1].steps.append(step)
        elif step.keyword == "ARG":
            known.update(pairs(step.text))
            known.update({name: value for name, value in (arguments or {}).items() if name in known})
        else:
            raise Unknown(f"{where}: {step.keyword} before the first FROM")
    return stages


def _steps(path: Path) -> list[Step]:
    steps: list[Step] = []
    gathered, began = "", 0
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("#") or not line.strip() and not gathered:
            continue
        began = began if gathered else number
        gathered += line.rstrip()
        if gathered.endswith("\\"):
            gathered = gathered[:-1].rstrip() + " "
            continue
        keyword, _, text = gathered.strip().partition(" ")
        gathered = ""
        if keyword not in KEYWORDS or "<<" in text:
            raise Unknown(f"{path}:{began}: {keyword} {text}")
        flags: dict[str, list[str]] = {}
        text = text.strip()
        while match := re.match(r"--([a-z-]+)=(\S+)\s+", text):
            flags.setdefault(match[1], []).append(match[2])
            text = text[match.end() :]
        steps.append(Step(began, keyword, flags, text))
    return steps


def ignored(patterns: list[str], path: str) -> bool:
    """Whether a .dockerignore keeps a file out; the last pattern that fits it or a folder above it counts."""
    parts = path.split("/")
    above = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    out = False
    for pattern in patterns:
        keep, plain = pattern.startswith("!"), pattern.lstrip("!").strip("/")
        anywhere = plain.startswith("**/")
        names = [name.rpartition("/")[2] for name in above] if anywhere else above
        same_depth = [n for n in names if anywhere or n.count("/") == plain.count("/")]
        if any(fnmatch.fnmatchcase(name, plain.removeprefix("**/")) for name in same_depth):
            out = not keep
    return out


def patterns(root: Path) -> list[str]:
    """The lines of the .dockerignore that say something."""
    lines = (root / ".dockerignore").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]
