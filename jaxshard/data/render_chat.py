"""Render a chat template in a child process: a script that `chat_template.py` runs.

A chat template is a Jinja program that came with a model. The environment here is that of transformers'
`apply_chat_template`: the sandbox of jinja2, which gives a program no way to Python's internals. The sandbox limits
neither loops nor memory. So the process ends itself after some seconds of CPU time, and gets no more memory than it is
given.

The arguments are these two limits, in seconds and bytes. Each line of the standard input is a JSON object, and is
answered with one: first {"templates": {name: program}}, then {"name": ..., "variables": {...}} for every text.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace as AnyNamespace


class Generation(Extension):
    """The tag `{% generation %}`, with which a template marks the text of the assistant.

    Attributes:
      parts: the pieces of the text that is being rendered, so far.
      marked: (begin, text) of each marked piece of it.
    """

    tags = {"generation"}  # noqa: RUF012  # jinja2 reads this set from the class
    parts: list[str]
    marked: list[tuple[int, str]]

    def parse(self, parser: Parser) -> Node:
        """Parse the tag and what is inside of it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Callable[[], str]) -> str:
        """Render what is inside of the tag, and remember where it is."""
        text = caller()
        self.marked.append((sum(map(len, self.parts)), text))
        return text

    def render(self, template: jinja2.Template, variables: dict[str, Any]) -> dict[str, Any]:
        """Render a template; return {"text": text, "marked": (begin, end) of each marked piece}."""
        self.parts, self.marked = [], []
        for part in template.generate(**variables):
            self.parts.append(part)
        text = "".join(self.parts)
        if any(text[begin : begin + len(piece)] != piece for begin, piece in self.marked):
            raise TemplateError("{% generation %} is in a macro or a filter, so that its place in the text is unknown")
        return {"text": text, "marked": [(begin, begin + len(piece)) for begin, piece in self.marked]}


class Environment(ImmutableSandboxedEnvironment):
    """The sandbox, which refuses attributes of Python's internals as soon as a template reads them."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Refuse an attribute."""
        raise SecurityError(f"it reads the attribute {attribute!r} of a {type(obj).__name__}, which no template may")


class Dictionary:
    """The function `dict` of templates, without the attributes of Python's class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class Namespace(AnyNamespace):
    """The function `namespace` of templates, without names that begin with an underscore."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"it sets {name!r} of a namespace, and names must not begin with an underscore")
        super().__setitem__(name, value)


def make_environment() -> Environment:
    """Make the environment of all templates, with the functions that templates of models expect."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    def tojson(x: Any, ensure_ascii: bool = False, **options: Any) -> str:  # jinja2's own is for HTML
        return json.dumps(x, ensure_ascii=ensure_ascii, **options)

    made = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = tojson
    made.globals |= {
        "raise_exception": raise_exception, "strftime_now": strftime_now, "dict": Dictionary(), "namespace": Namespace,
    }  # fmt: skip
    return made


def main(seconds: float, memory: int) -> None:
    """Answer every line of the standard input; end when it is closed, or at a limit."""
    if sys.platform != "darwin":  # where this limit can't be set
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # libtpu ignores it in the parent, and a child inherits that
    environment = make_environment()
    (generation,) = (one for one in environment.extensions.values() if isinstance(one, Generation))
    templates: dict[str, jinja2.Template] = {}
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process
        answer: dict[str, Any] = {}
        try:
            request = json.loads(line)
            if "templates" in request:
                templates = {name: environment.from_string(text) for name, text in request["templates"].items()}
            else:
                answer = generation.render(templates[request["name"]], request["variables"])
        except Exception as error:  # a template is a program, and may raise anything
            text = " ".join(str(error).split()) or type(error).__name__
            if isinstance(error, MemoryError):
                text = f"it needs more than {memory >> 20} MiB of memory"
            never = isinstance(error, SecurityError | TemplateSyntaxError | MemoryError)
            answer = {"error": text, "never": never}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
