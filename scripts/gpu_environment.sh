# Sourced by the training scripts: what they set for GPUs, with the reason; what the user has set stays. See docs/gpu.md.

# No two packs have the same shapes. Segments that grow are not cut into pieces that fit the next pack no more.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
# NVLink multicast takes buffers of device memory for every group of ranks, and the exchanges that gain from it run beside
# the backward pass; NVIDIA's own recipes for Megatron turn it off too.
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
# Worker processes decode one image each; threads inside them would only take cores from each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# Megatron's flags for GPUs. Norms and residuals are divided among the tensor-parallel ranks and take 1/TP of the memory;
# gradients are reduced beside the backward passes and weights gathered beside the forward passes.
# shellcheck disable=SC2034
OVERLAP=(--sequence-parallel --overlap-grad-reduce --overlap-param-gather)
