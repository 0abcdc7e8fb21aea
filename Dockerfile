# The server in a container:
#   docker build -t manta .
#   docker run --gpus all -p 8000:8000 -v ~/.cache/huggingface:/models manta --model Qwen/Qwen3-0.6B
# torch brings CUDA along, so any Debian or Ubuntu will do as BASE, and the host needs NVIDIA's container toolkit. For CPUs
# alone, `--build-arg PIP_EXTRA_INDEX_URL=...` with the index of torch's CPU build (pytorch.org names it) saves several GB.
ARG BASE=ubuntu:24.04
FROM ${BASE}

# Triton compiles C for each kernel that it launches, and on a CPU C++ is made of some ops.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home manta && install -d -o manta /models

ARG PIP_EXTRA_INDEX_URL
ENV PATH=/opt/manta/bin:$PATH HF_HOME=/models
RUN --mount=type=bind,source=requirements.txt,target=/tmp/requirements.txt \
    python3 -m venv /opt/manta && pip install --no-cache-dir -r /tmp/requirements.txt
RUN --mount=type=bind,target=/src,rw pip install --no-cache-dir --no-deps /src

USER manta
VOLUME /models
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=6s --start-period=30m \
    CMD ["python3", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["manta", "--host", "0.0.0.0"]
