# syntax=docker/dockerfile:1
# docker build --target cpu -t kernels-dsl:cpu .     compiles and emulates; the tests run in it
# docker build -t kernels-dsl .                      with an NVIDIA GPU: docker run --rm --gpus all kernels-dsl

# hadolint global ignore=DL3008,DL3013
FROM python:3.12-slim AS cpu
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential git \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /kernels-dsl
COPY . .
RUN tools/make_venv.sh && rm -rf /root/.cache/pip
CMD [".venv/bin/python", "-m", "kernels_dsl", "demo"]

# torch's wheels bring CUDA's libraries along, so that the base needs the driver's interface alone.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS gpu
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential git python3 python3-venv python3-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /kernels-dsl
COPY . .
# No GPU is there while an image is built: ask for the CUDA build by name.
RUN python3 -m venv .venv \
    && .venv/bin/pip install --no-cache-dir --editable ".[test,bench,emulator-fast,cu13]" \
    && touch .venv/.complete
CMD [".venv/bin/python", "-m", "kernels_dsl", "demo"]
