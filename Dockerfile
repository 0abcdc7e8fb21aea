# The server in a container, or another command of it (chat, complete, batch):
#   docker build -t manta .
#   docker run --gpus all -p 8000:8000 -v manta:/models manta --model Qwen/Qwen3-0.6B
#   docker run --gpus all -it -v manta:/models manta chat Qwen/Qwen3-0.6B
# The volume keeps what is downloaded and compiled. A folder of the host in its place must belong to uid 1000.
# torch brings CUDA along, so any Debian or Ubuntu will do as BASE, and the host needs NVIDIA's container toolkit. For CPUs
# alone, `--build-arg PIP_EXTRA_INDEX_URL=...` with the index of torch's CPU build (pytorch.org names it) saves several GB.
ARG BASE=ubuntu:24.04
FROM ${BASE}
LABEL org.opencontainers.image.title=manta org.opencontainers.image.version=0.2.0

# Triton compiles C for each kernel that it launches, and on a CPU C++ is made of some ops.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
# Ubuntu's image has a user of uid 1000 already. The home is the volume, so the caches in it last: Triton's, and the C++.
RUN if name=$(id -nu 1000); then userdel --remove "$name"; fi; useradd --uid 1000 --home-dir /models --create-home manta

ARG PIP_EXTRA_INDEX_URL
ENV PATH=/opt/manta/bin:$PATH HOME=/models HF_HOME=/models
RUN --mount=type=bind,source=requirements.txt,target=/tmp/requirements.txt \
    python3 -m venv /opt/manta && pip install --no-cache-dir -r /tmp/requirements.txt
RUN --mount=type=bind,target=/src,rw pip install --no-cache-dir --no-deps /src
COPY --chmod=755 <<'EOF' /opt/manta/bin/manta-container
#!/bin/sh
case "$1" in
    chat | complete | batch | bench) exec manta "$@" ;;
    serve) shift ;;
esac
exec manta serve --host 0.0.0.0 "$@"
EOF

USER 1000:1000
WORKDIR /models
VOLUME /models
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=6s --start-period=30m \
    CMD ["python3", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["manta-container"]
