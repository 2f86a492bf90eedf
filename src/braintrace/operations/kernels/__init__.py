"""Kernels for CPUs.

They need llvmlite, which is optional, so a file is imported where its kernel is called:

    native            loops compiled by LLVM and called by XLA
    trace_parts       what there is of a trace, which all visits of traces share
    dense_visit       a visit of a dense trace after one step; span_visit, after many
    sparse_visit      a visit of a sparse trace; row_visit, with few samples
    products          sparse products; row_product, those of large arrays
    spike_bits        inputs as bits; transpose, transposed copies
"""
