# evenstep in a container: docs/containers.md says how to run it.
#
#   docker build --tag evenstep .                              for CPUs
#   docker build --tag evenstep --build-arg WHEELS=cu130 .     for GPUs: PyTorch for CUDA 13.0
#   docker run --rm --init --shm-size=1g evenstep train --smoke-test

FROM python:3.11-slim

# Which build of PyTorch: cpu, or that of a CUDA version.
ARG WHEELS=cpu
ARG INDEX=https://download.pytorch.org/whl

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

# PyTorch in a layer of its own: it is large and changes seldom. 2.14.1+cpu counts as newer than 2.14.1.
COPY constraints.txt /build/
RUN pip install --constraint /build/constraints.txt --extra-index-url "$INDEX/$WHEELS" torch torchvision

COPY pyproject.toml README.md LICENSE /build/
COPY src /build/src
RUN pip install --constraint /build/constraints.txt --extra-index-url "$INDEX/$WHEELS" /build

# Not root. What a run writes goes to /work/runs, decoded images to /work/.cache: mount what is to be kept.
RUN useradd --create-home --home-dir /work --uid 1000 evenstep && install -d -o evenstep /work/runs
USER evenstep
WORKDIR /work

ENTRYPOINT ["evenstep"]
CMD ["--help"]
