"""Pictures of plans: memory by role, the roofline, and the sharding of each array as tiles on the mesh.

They need matplotlib (extra viz), write PNG, SVG and PDF, and use colours that colour-blind people tell apart.

Imports what `plan/` imports.
"""
