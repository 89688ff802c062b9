# NVIDIA's PyTorch image brings CUDA, PyTorch, Transformer Engine and Apex; only what it lacks is added.
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

ENV CUDA_DEVICE_MAX_CONNECTIONS=1
CMD ["omnibal", "--help"]
