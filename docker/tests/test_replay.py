"""The reader of Dockerfiles that the replay and these tests stand on."""

import dockerfile
import pytest

TEXT = r"""
# A comment.
ARG RUST=1.0
FROM rust:${RUST}-slim AS build
ENV A=1 \
    # between lines
    B="two words" C=${A:-x}
RUN --mount=type=cache,target=/a,sharing=locked \
    --mount=type=bind,from=build,source=/x,target=/y \
    echo "$A" \
    && true
FROM debian:slim
COPY --from=build /out /out
ENV PATH=/b:$A:$MISSING
HEALTHCHECK --interval=10s CMD ["taper", "health"]
CMD ["serve"]
"""


def read(tmp_path, text, **more):
    path = tmp_path / "Dockerfile"
    path.write_text(text)
    return dockerfile.read(path, **more)


def test_stages_steps_flags_and_variables(tmp_path):
    build, last = read(tmp_path, TEXT)
    assert (build.name, build.base, last.name, last.base) == ("build", "rust:1.0-slim", "1", "debian:slim")
    assert build.environment() == {"A": "1", "B": "two words", "C": "x"}
    (run,) = build.all("RUN")
    assert run.mounts() == [
        {"type": "cache", "target": "/a", "sharing": "locked"},
        {"type": "bind", "from": "build", "source": "/x", "target": "/y"},
    ]
    assert run.text.split("&&")[0].strip() == 'echo "$A"'
    assert last.all("COPY")[0].flags == {"from": ["build"]}
    assert last.environment() == {"PATH": "/b::"}
    assert last.last("CMD").words() == ["serve"]
    assert last.last("HEALTHCHECK").text == 'CMD ["taper", "health"]'
    assert read(tmp_path, TEXT, arguments={"RUST": "2.0"})[0].base == "rust:2.0-slim"


@pytest.mark.parametrize(
    "text",
    [
        "RUN true",
        "FROM a\nADD x y",
        "FROM a\nRUN <<E\ntrue\nE",
        "FROM --platform=x a",
        "FROM a\nENV A b",
        "FROM a\nARG X=1",
    ],
)
def test_what_is_not_understood_is_refused(tmp_path, text):
    with pytest.raises(dockerfile.Unknown):
        [stage.environment() for stage in read(tmp_path, text)]


def test_the_last_pattern_that_fits_counts():
    rules = ["*", "!crates", "crates/*/tests", "!Cargo.*", "**/__pycache__"]
    out = ["x", "x/y", "crates/a/tests/b.rs", "crates/a/__pycache__/c", "target"]
    kept = ["crates", "crates/a/src/lib.rs", "crates/tests", "Cargo.toml"]
    assert [path for path in out + kept if dockerfile.ignored(rules, path)] == out
