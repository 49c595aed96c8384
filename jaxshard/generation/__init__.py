"""Generate tokens with a KV cache: run the model once on each prompt (prefill), then on each new token (decode).

Imports `core/`, `adapt/`, `engines/`, `training/` and `reshard/`.
"""
