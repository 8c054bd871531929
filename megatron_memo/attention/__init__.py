"""Core attention by other kernels than Megatron's own, and the comparison of any kernel with a reference. Knows torch, not Megatron.

    backends        the kernels: make_backend, describe, available
    check           is a kernel right: check_small, check_long, require
    reference       what attention is, in float64, for all rows or a sample of them
    cases           inputs on which a wrong mask shows
    verdict_cache   full-length checks that passed on this machine
"""
