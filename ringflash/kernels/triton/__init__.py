"""Flash-attention kernels for any GPU that Triton supports."""
