"""Prove properties of a jaxpr by an abstract interpreter.

    walk            the interpreter: facts go through calls, loops and branches of one program, or of two traces
    dims            where a dimension of an operand goes in an equation
    alike           compare two jaxprs
    equal           a domain: over which mesh axes a value may differ between devices
    parting         collectives in branches on which devices may decide differently
    handed_through  results that are unchanged arguments

The proofs about optimizers (`optim/proof`), stacked matrices (`optim/owners/slices`) and positions of a sequence
(`adapt/positionwise`) are domains of the same interpreter. Imports `core/`.
"""
