"""Prove that a loss treats every position independently, so that each device can run it on its own positions.

    prove       the entry: trace the loss, check its results, return the findings
    walk        the domain of `proofs/walk.py`: the facts of both jaxprs, and what is refused
    rules       the rule of each primitive: how positions move from operands to results; indexing has gather and scatter
    backward    the backward passes of custom_vjp functions
    shares      the operations that are allowed on a device's share of a sum or maximum over positions
    facts       what the proof knows about one value
    rows        the same walk over two batch sizes: find means whose weight does not scale like their total
    report      locate a finding in the user's code, and say what to write instead

A position is an index along the sequence, which `js.context` splits over devices. A loss is traced twice, on all
positions and on one device's positions. The two jaxprs show how every dimension, literal and constant depends on the
number of positions. So the proof holds for this number of positions and devices.
"""
