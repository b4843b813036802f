# Taper on H100 and H200, CUDA 13. The host has a driver of 580 or later and NVIDIA's container toolkit.
#
#   docker build -f docker/cuda.Dockerfile -t taper:cuda .
#   docker run --gpus all -p 127.0.0.1:8080:8080 -v taper-models:/models taper:cuda

# What every test of the project runs with; Cargo.toml says the oldest that will do.
ARG RUST=1.95

# Compiler and libraries; of this image nothing else is used.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04 AS cuda

FROM rust:${RUST}-slim-bookworm AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY Cargo.toml Cargo.lock ./
COPY configs configs
COPY crates crates
COPY kernels kernels
ENV CUDA_HOME=/usr/local/cuda-13.0 \
    CUDA_COMPUTE_CAP=90
# The libraries by the names under which the program asks for them: the driver's libcuda.so.1 comes with the host.
RUN --mount=type=bind,from=cuda,source=/usr/local/cuda-13.0,target=/usr/local/cuda-13.0 \
    --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,id=taper-cuda,target=/src/target,sharing=locked \
    export PATH="$CUDA_HOME/bin:$PATH" \
    && cargo build --release --locked --package taper --features cuda \
    && install -D --strip target/release/taper /out/taper \
    && install -D --mode=644 --target-directory=/out/lib \
        "$CUDA_HOME/lib64/libcublas.so.13" \
        "$CUDA_HOME/lib64/libcublasLt.so.13" \
        "$CUDA_HOME/lib64/libcudart.so.13" \
        "$CUDA_HOME/lib64/libcurand.so.10"

FROM debian:bookworm-slim
COPY --from=build /out/lib /usr/local/lib
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates libstdc++6 \
    && rm -rf /var/lib/apt/lists/* \
    && ldconfig \
    && install --directory --owner=10001 --group=10001 /models
COPY LICENSE-APACHE LICENSE-MIT /usr/share/doc/taper/
COPY --from=build /out/taper /usr/local/bin/taper

# Models that are fetched are kept under /models/taper; others may lie beside it, such as /models/Llama-3.1-8B-Instruct.
# NVIDIA_… is what the container toolkit reads: which devices, which parts of the driver, and the oldest that will do.
# Kernels that the driver compiles are kept in the folder of CUDA_CACHE_PATH.
ENV XDG_CACHE_HOME=/models \
    TAPER_HOST=0.0.0.0 \
    TAPER_DEVICE=cuda \
    CUDA_CACHE_PATH=/tmp/cuda \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_REQUIRE_CUDA="cuda>=13.0"
VOLUME /models
USER 10001:10001
EXPOSE 8080
# A large model may take minutes to load; until then only the start period passes.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 CMD ["taper", "health"]
ENTRYPOINT ["taper"]
CMD ["serve"]
