"""The audit of anyone's compiled step, of which there is only the text: `audit_program`, `jaxshard audit --hlo`.

- `text` parses the text, and refuses what is no compiled program; `axes` names the positions of its devices.
- `arguments` are the entry's parameters with their roles, `forms` knows an array by its shape. With these and
  `collectives/trail` `moves` says what every collective moves.
- `terms` is what a strategy promises of an array that is known from the program alone, compared as `js.audit` compares;
  `report` puts both together.

Imports what `checks/` imports.
"""
