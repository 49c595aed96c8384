"""`js.attention`: sharding by the layout (`split.py`), context parallelism (`context.py`), and the kernels.

    attention -> split -> context: zigzag, ring -> splash on TPUs, cudnn on GPUs, blockwise and formula elsewhere

Imports `core/`.
"""
