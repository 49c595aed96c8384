"""Every test runs on eight simulated CPU devices."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax

jax.config.update("jax_num_cpu_devices", 8)
