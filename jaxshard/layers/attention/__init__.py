"""`js.attention`: sharding by the layout (`split`), context parallelism (`context`), and the kernels.

    attention -> split -> context: zigzag, ring -> splash on TPUs, cudnn on GPUs, blockwise and formula elsewhere

Imports `core/`.
"""
