"""Generate tokens with a KV cache: read each prompt once (prefill), then run one position per new token (decode).

Imports `core/`, `adapt/`, `engines/` and `training/`.
"""
