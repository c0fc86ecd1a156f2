"""The inner loops of compressors: plain torch for every device, and faster kernels that give the same bits.

    reference/    plain torch: shown in documentation; the others must agree with it
    numba_cpu/    compiled loops for CPUs, where numba is installed
    triton_gpu/   fused kernels for GPUs, where Triton is installed

A module in these folders is named after a family of kernels: quantizers, topk, approximate_topk, lowrank, indices. The
module of the same name in this folder is called by compressors; `loader` picks the folder for a tensor's device. A
folder need not have every family: the reference covers what it lacks.
"""
