"""`js.attention`: what a layout splits (`split`), over a context (`context`), and the kernels that compute it.

    attention -> split -> context: zigzag, ring -> splash on TPUs, cudnn on GPUs, blockwise and formula elsewhere

Imports `core/`.
"""
