"""Pictures of plans: memory by role, the roofline, and the sharding of each array as tiles on the mesh.

They need matplotlib (extra viz) and have the look of `core/pictures/`.

Imports what `plan/` imports.
"""
