"""Turn the Markdown pages, notebooks and docstrings of this repository into a site, and check them.

- build.py: the command `docs/build`.
- sources.py: which files become which pages. links.py: relative links of a Git host made links of the site.
- public_names.py: every public name and its docstring. docstring.py: a docstring taken apart, as Markdown.
- name_pages.py: a page for each name. command_page.py: the page of the commands, from their own help.
- references.py: an extension of Sphinx by which `js.fsdp` in a text is a link to its page.
- checks.py: spelling, grammar and conventions.
"""
