# syntax=docker/dockerfile:1.10
# The edge, without torch:  docker build -f deploy/images/edge.Dockerfile -t ghcr.io/kinroute/edge:0.1.0 .
# A release gives the digest too: --build-arg PYTHON=3.11.14-slim-trixie@sha256:...
ARG PYTHON=3.11.14-slim-trixie

FROM python:${PYTHON} AS build
ARG BUILDKIT_SBOM_SCAN_STAGE=true
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip deploy/images/install edge /opt/kinroute

FROM python:${PYTHON}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kinroute edge" \
      org.opencontainers.image.description="Places each prompt near its relatives' KV cache, and streams the answer." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="docker.io/library/python" \
      dev.kinroute.packages="/opt/kinroute/packages.json"
COPY --from=build /opt/kinroute /opt/kinroute
ENV PATH=/opt/kinroute/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 65532:65532
WORKDIR /tmp
# HTTP, admin, and OpenEngine where it is set.
EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8001/live', timeout=4)"]
ENTRYPOINT ["kinroute"]
CMD ["edge", "--config", "/etc/kinroute/settings/edge.yaml"]
