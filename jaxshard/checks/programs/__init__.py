"""Audit the HLO text of any compiled step: `js.plan.audit_program`, `jaxshard audit --hlo`.

- `text` parses the text, and refuses anything but a compiled program; `axes` makes a mesh of its device positions.
- `arguments` lists the entry's parameters with their roles, `forms` recognises a parameter by its shape. With these and
  `hlo/trail`, `moves` labels each array that a collective moves.
- `terms` compares these arrays with the collectives that a strategy allows, as `js.audit` does; `report` combines
  everything.
- `live` names the arrays that are live at the peak of a program's memory.

Imports what `checks/` imports.
"""
