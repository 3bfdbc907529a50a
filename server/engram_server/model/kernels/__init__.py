"""Linear layers, attention kernels and CUDA graphs, and the choice between them."""
