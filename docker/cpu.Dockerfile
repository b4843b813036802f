# Taper on the CPU, for x86-64 of any age: what the processor has is looked up when the server starts.
#
#   docker build -f docker/cpu.Dockerfile -t taper:cpu .

# What every test of the project runs with; Cargo.toml says the oldest that will do.
ARG RUST=1.95

FROM rust:${RUST}-slim-bookworm AS build
WORKDIR /src
COPY Cargo.toml Cargo.lock ./
COPY configs configs
COPY crates crates
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,id=taper-cpu,target=/src/target,sharing=locked \
    cargo build --release --locked --package taper \
    && install -D --strip target/release/taper /out/taper

FROM debian:bookworm-slim
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && install --directory --owner=10001 --group=10001 /models
COPY LICENSE-APACHE LICENSE-MIT /usr/share/doc/taper/
COPY --from=build /out/taper /usr/local/bin/taper

# Models that are fetched are kept under /models/taper; others may lie beside it, such as /models/Llama-3.2-1B-Instruct.
ENV XDG_CACHE_HOME=/models \
    TAPER_HOST=0.0.0.0
VOLUME /models
USER 10001:10001
EXPOSE 8080
# A large model may take minutes to load; until then only the start period passes.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 CMD ["taper", "health"]
ENTRYPOINT ["taper"]
CMD ["serve"]
