"""A proof that a loss treats positions one by one, so that each device may run it on its own part of them.

    prove       the question and the answer: what is traced, what may come out, the list of findings
    walk        through two traces of a program at once, into its calls, loops and branches
    rules       what each primitive does to the positions of its operands; indexing has slices, gathers and scatters
    backward    the backward passes that users write
    shares      what may be done with sums and maxima over positions
    facts       what is known of one value
    rows        the same walk over two numbers of rows: means whose weight does not grow as their total does
    report      where in the user's code, and what to write instead

A loss is traced twice, on all positions and on one device's share. That tells how a dimension, a number or a constant
depends on how many positions there are, so a program that passes is right for this very number of devices.
"""
