# syntax=docker/dockerfile:1
# Targets: cpu (numpy and torch), cuda (torch with CUDA, kernel libraries for sm_90a and sm_100a).
#   docker build --target cpu  -t gemm-service:cpu --build-arg TORCH_ARGS="--extra-index-url INDEX" .
#   docker build --target cuda -t gemm-service:cuda .

ARG PYTHON_IMAGE=python:3.12-slim-bookworm

# ---- the application, in a virtual environment that the final stages copy --------------------------------------
FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml constraints.txt README.md ./
# The list of what an image holds (SBOM) is made by a tool that the image doesn't hold.
RUN python -m venv /opt/venv \
 && python -m venv /opt/tools \
 && /opt/tools/bin/pip install -c constraints.txt cyclonedx-bom
COPY service service
COPY kernels kernels
# What the page shows of the ladder as it was measured; service/page/results leads there.
COPY benchmarks/results benchmarks/results

FROM build AS build-cpu
# TORCH_ARGS names an index of torch's CPU builds beside the usual one, which has all else; without it torch comes with
# CUDA's libraries, several GB of them.
ARG TORCH_ARGS=""
RUN /opt/venv/bin/pip install -c constraints.txt ${TORCH_ARGS} '.[torch,grpc,cluster,otel]' \
 && /opt/tools/bin/cyclonedx-py environment --output-reproducible -o /opt/venv/sbom.json /opt/venv/bin/python

FROM build AS build-cuda
RUN /opt/venv/bin/pip install -c constraints.txt '.[gpu,grpc,cluster,otel]' \
 && /opt/tools/bin/cyclonedx-py environment --output-reproducible -o /opt/venv/sbom.json /opt/venv/bin/python

# ---- the kernels, compiled ahead of time: the final image holds no compiler -----------------------------------
FROM build AS kernels
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
RUN /opt/venv/bin/pip install -c constraints.txt '.[compiler]'
RUN GEMM_KERNELS=/opt/kernels /opt/venv/bin/python -m kernels build --arch sm_90a \
 && GEMM_KERNELS=/opt/kernels /opt/venv/bin/python -m kernels build --arch sm_100a

# ---- what both final images share ------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS runtime
# Any user may run it: everything is readable, /data alone is written (group 0, as arbitrary-UID platforms expect).
# Sticky, so that nobody else of the group can put another file in the place of one: what is measured there is trusted.
RUN groupadd --system --gid 10001 gemm \
 && useradd --system --uid 10001 --gid gemm --groups 0 --no-create-home --home-dir /nonexistent gemm \
 && install -d -o 10001 -g 0 -m 1770 /data
ENV PATH=/opt/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    GEMM_HOST=0.0.0.0 GEMM_PORT=8000 GEMM_DATA=/data GEMM_LOG_FORMAT=json
VOLUME /data
EXPOSE 8000
USER 10001
STOPSIGNAL SIGTERM
# Readiness: a worker takes work. The first check waits for the worker to load its library.
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
  CMD ["python", "-c", "import sys, urllib.request as u; sys.exit(u.urlopen('http://127.0.0.1:8000/health/ready', timeout=2).status != 200)"]
ENTRYPOINT ["gemm-service"]
# Beyond loopback the service wants keys: mount a file and set GEMM_KEYS_FILE, or say --insecure knowingly.
CMD ["serve"]

FROM runtime AS cpu
COPY --from=build-cpu /opt/venv /opt/venv
ENV GEMM_DEVICE=cpu

FROM runtime AS cuda
COPY --from=build-cuda /opt/venv /opt/venv
COPY --from=kernels /opt/kernels /opt/kernels
# The driver comes from the node (NVIDIA Container Toolkit); torch brings the CUDA runtime.
# Outcomes of self-tests and measured times lie beside the data, so that a restart needn't test again.
ENV GEMM_DEVICE=cuda GEMM_KERNELS=/opt/kernels GEMM_CACHE=/data/kernels NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
