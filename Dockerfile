# NVIDIA's PyTorch image brings CUDA, PyTorch, Transformer Engine and Apex; only what it lacks is added.
#
#   docker build -t omnibal .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 -v /data:/data omnibal COMMAND
#
# --ipc=host: workers hand decoded tiles over, and NCCL's ranks of a node talk, through /dev/shm, of which a container has
# 64 MiB otherwise. memlock: pinned memory. stack: as NVIDIA asks for its images.
FROM nvcr.io/nvidia/pytorch:25.09-py3

WORKDIR /opt/omnibal
COPY setup.py pyproject.toml README.md LICENSE ./
COPY omnibal_ext omnibal_ext
COPY megatron megatron
COPY tools tools
COPY scripts scripts

# The image pins its own torch in a constraint file; nothing here may replace it.
RUN python -m pip install --no-cache-dir "megatron-core>=0.19.2,<0.20" && \
    python -m pip install --no-cache-dir --no-build-isolation --editable '.[hf,demo,png]'

# The reasons stand in scripts/gpu_environment.sh.
ENV PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \
    NCCL_NVLS_ENABLE=0 \
    OMP_NUM_THREADS=1
CMD ["omnibal", "--help"]
