# vLLM's own image with pdkv and its connector in it, for deploy/k8s/overlays/vllm. From the repository's root:
#   docker build -f deploy/docker/vllm.Dockerfile -t vllm-pdkv:0.32.0-0.1.0 .
ARG BASE=vllm/vllm-openai:v0.32.0
FROM ${BASE}
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
COPY LICENSE README.md pyproject.toml /src/
COPY pdkv /src/pdkv
# torch and vLLM stay what they are, or there is no image.
# hadolint ignore=DL3042
RUN python3 -m pip list --format=freeze | grep -E '^(torch|vllm)==' > /tmp/kept \
    && python3 -m pip install --no-cache-dir --constraint /tmp/kept /src \
    && rm -r /src /tmp/kept \
    && pdkv --version
