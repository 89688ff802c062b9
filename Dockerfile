# CUDA with its compiler and cuDNN from NVIDIA's public image; torch and Transformer Engine from their wheels.
# (NVIDIA's PyTorch image has all three, but pins packages that megatron-core asks newer ones of.)
#
#   docker build -t omnibal .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 -v /data:/data omnibal COMMAND
#
# --ipc=host: workers hand decoded tiles over, and NCCL's ranks of a node talk, through /dev/shm, of which a container has
# 64 MiB otherwise. memlock: pinned memory. stack: as NVIDIA asks for its images. CUDA 13 needs a driver from 580 on.
# Another image of Ubuntu 24.04 with CUDA's compiler: --build-arg BASE=IMAGE.
ARG BASE=nvidia/cuda:13.1.1-cudnn-devel-ubuntu24.04
FROM ${BASE}

# Python 3.12, which megatron-core has wheels for, with its headers and a compiler: torch compiles small functions.
RUN apt-get update && \
    apt-get install --yes --no-install-recommends python3-venv python3-dev build-essential && \
    rm -rf /var/lib/apt/lists/*
# The system's own Python takes no packages from pip.
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

# One torch for all that follows. Its wheel brings CUDA 13.0's libraries, cuDNN and NCCL. From 2.8 on Transformer Engine's
# layers can leave weight gradients for later, which zero-bubble schedules ask of them.
RUN printf '%s\n' torch==2.13.0 transformer-engine==2.20.2 transformer-engine-torch==2.20.2 >/opt/constraints.txt
ENV PIP_CONSTRAINT=/opt/constraints.txt \
    PIP_NO_CACHE_DIR=1
RUN pip install torch setuptools wheel ninja pybind11

# The library is a wheel. What ties it to torch is one too where NVIDIA has built it for this torch, and is compiled here
# otherwise: minutes on many cores, each of which takes some GB of memory.
RUN MAX_JOBS=8 NVTE_FRAMEWORK=pytorch pip install --no-build-isolation 'transformer-engine[pytorch]'

# The project and what it asks for, megatron-core among it.
WORKDIR /opt/omnibal
COPY setup.py pyproject.toml README.md LICENSE ./
COPY omnibal_ext omnibal_ext
COPY megatron megatron
COPY tools tools
COPY scripts scripts
COPY examples examples
RUN pip install --no-build-isolation --editable '.[train,demo]'

# The reasons stand in scripts/gpu_environment.sh.
ENV PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \
    NCCL_NVLS_ENABLE=0 \
    OMP_NUM_THREADS=1
CMD ["omnibal", "--help"]
# What cannot be imported is seen here, and not on the cluster.
RUN python -c 'import megatron.vlm.pretrain'
