"""An extension of Sphinx: `js.fsdp` in a text is a link to its page, and an error where there is no such name."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from docutils import nodes
from sphinx.addnodes import desc_signature, pending_xref
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

import jaxshard as js

HISTORY = ("records/changes",)
"""Pages that name what is no longer there."""

_WHOLE = re.compile(r"(js(?:\.\w+)+)(?:[(\[].*)?", re.DOTALL)
_NAMES = re.compile(r"(?<![\w./])js(?:\.[A-Za-z_]\w*)+")
_TYPES = ("class", "exception", "data")
_logger = logging.getLogger(__name__)


class LinkNames(SphinxPostTransform):
    """Makes links of the public names that stand in code spans."""

    default_priority = 15

    def run(self, **_: Any) -> None:
        for literal in list(self.document.findall(nodes.literal)):
            text = literal.astext()
            for name in _NAMES.findall(text):
                if not exists(name) and self.env.docname not in HISTORY:
                    _logger.warning("unknown name %s", name, location=literal, type="ref", subtype="name")
            found = _WHOLE.fullmatch(text)
            if found and not _has_parent(literal, (nodes.reference, nodes.title, pending_xref)):
                self._link(literal, found[1])

    def _link(self, literal: nodes.literal, name: str) -> None:
        objects = self.env.domaindata["py"]["objects"]
        while name not in objects:
            name = name.rpartition(".")[0]
            if not name:
                return
        entry = objects[name]
        if entry.docname == self.env.docname:
            return
        literal.replace_self(
            make_refnode(self.app.builder, self.env.docname, entry.docname, entry.node_id, literal.deepcopy(), name)
        )


def exists(name: str) -> bool:
    """Return True if a dotted name such as `js.Layout.explain` exists, fields of classes included."""
    value: Any = js
    for part in name.split(".")[1:]:
        fields = getattr(value, "__annotations__", {}) if isinstance(value, type) else {}
        if isinstance(value, type) and dataclasses.is_dataclass(value):
            fields = {**fields, **{field.name: field.type for field in dataclasses.fields(value)}}
        if not hasattr(value, part):
            return part in fields
        value = getattr(value, part)
    return True


class LinkTypes(SphinxPostTransform):
    """Makes links of the types in signatures that are public names; those of other packages stay text."""

    default_priority = 5

    def run(self, **_: Any) -> None:
        objects = self.env.domaindata["py"]["objects"]
        for node in list(self.document.findall(pending_xref)):
            if not _has_parent(node, (desc_signature,)):
                continue
            last = node["reftarget"].rpartition(".")[2]
            types = [name for name in objects if name.rpartition(".")[2] == last and objects[name].objtype in _TYPES]
            content = node.children[0].deepcopy()
            if types:
                entry = objects[min(types, key=lambda name: not self.env.docname.endswith(name))]
                arguments = (self.env.docname, entry.docname, entry.node_id, content, types[0])
                content = make_refnode(self.app.builder, *arguments)
            node.replace_self(content)


def _has_parent(node: nodes.Node, kinds: tuple[type, ...]) -> bool:
    parent = node.parent
    while parent is not None:
        if isinstance(parent, kinds):
            return True
        parent = parent.parent
    return False


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_post_transform(LinkNames)
    app.add_post_transform(LinkTypes)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
