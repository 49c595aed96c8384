"""What an operation costs: FLOPs counted in a function's program, and what the chips can do, from their data sheets.

Imports nothing else of this package.
"""
