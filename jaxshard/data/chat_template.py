"""`ChatTemplate`: the Jinja programs of a tokenizer that write a conversation as text, run in a child process."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

SECONDS = 5
"""The CPU time, in seconds, in which a conversation must be rendered."""
MEMORY = 1 << 29
"""The bytes of memory that rendering may take."""
CHILD = Path(__file__).with_name("render_chat.py")

_JINJA = "3.1.6"
"""The oldest jinja2 without a known way out of its sandbox."""

Messages = Sequence[Mapping[str, Any]]
"""A conversation: {"role": ..., "content": ...} of each message."""


class TemplateRefusedError(ValueError):
    """A chat template can't be used, whatever the conversation."""


class Rendered(NamedTuple):
    """The text of a conversation.

    Attributes:
      text: the text, with all special tokens in it.
      marked: (begin, end) of the characters that the template marks as the assistant's by `{% generation %}`.
    """

    text: str
    marked: tuple[tuple[int, int], ...]


class ChatTemplate(NamedTuple):
    """The Jinja programs of a tokenizer that write a conversation as text.

    Attributes:
      file: the file with the program, or with several.
      programs: {name: program}; "tool_use" is for conversations with tools, "default" for all others.
      tokens: {name: text} of special tokens, such as "bos_token", which programs may use.
    """

    file: Path
    programs: Mapping[str, str]
    tokens: Mapping[str, str]

    @property
    def digest(self) -> str:
        """Return a hash of the programs and the special tokens, in hexadecimal."""
        return hashlib.sha256(json.dumps([self.programs, self.tokens], sort_keys=True).encode()).hexdigest()

    @contextmanager
    def renderer(self) -> Iterator[Renderer]:
        """Start the child process that renders conversations, and end it at the end of the `with` block.

        Raises:
          ImportError: jinja2 is missing or too old.
          TemplateRefusedError: a program is not valid.
        """
        _check_jinja(self.file)
        # -P keeps the script's folder out of the import path. The child ends when its standard input closes.
        command = [sys.executable, "-P", str(CHILD), str(SECONDS), str(MEMORY)]
        pipe, none = subprocess.PIPE, subprocess.DEVNULL
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=none) as child:
            renderer = Renderer(self, child)
            try:
                renderer.ask({"templates": dict(self.programs)})
                yield renderer
            finally:
                renderer.close()


class Renderer:
    """Render conversations by a chat template, in a child process that is running.

    Args:
      template: the template.
      child: the process.
    """

    def __init__(self, template: ChatTemplate, child: subprocess.Popen[bytes]) -> None:
        self._template, self._child = template, child

    def render(
        self, messages: Messages, tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> Rendered:
        """Render a conversation as text.

        Args:
          messages: the messages; entries that are None are left out.
          tools: descriptions of the functions that the model may call, as JSON objects.
          add_generation_prompt: let the text end where the assistant is to answer.

        Raises:
          TypeError: the messages are no list of objects.
          ValueError: the template refuses the conversation.
          TemplateRefusedError: the template itself can't be used: it reads what it must not, loops for too long, or
            needs too much memory.
        """
        programs = self._template.programs
        name = "tool_use" if tools and "tool_use" in programs else "default"
        if name not in programs:
            raise TemplateRefusedError(
                f"{self._template.file} has no chat template with the name 'default'; it has {', '.join(programs)}"
            )
        if not all(isinstance(one, Mapping) for one in messages):
            raise TypeError(f'messages must be a list of {{"role": ..., "content": ...}}, got {messages!r:.60}')
        plain = [{key: value for key, value in one.items() if value is not None} for one in messages]
        asked = {"messages": plain, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        answer = self.ask({"name": name, "variables": {**self._template.tokens, **asked}})
        return Rendered(answer["text"], tuple((begin, end) for begin, end in answer["marked"]))

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to the child, and return its answer.

        Raises:
          ValueError: the template refuses the conversation, or can't be used.
        """
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            raise TemplateRefusedError(f"{self._name}: {self._why_it_ended()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            kind = TemplateRefusedError if answer["never"] else ValueError
            raise kind(f"{self._name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the child."""
        self._child.kill()
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):  # because of a request that the child has not read
            self._child.stdin.close()

    @property
    def _name(self) -> str:
        return f"the chat template in {self._template.file}"

    def _why_it_ended(self) -> str:
        code = self._child.wait()
        if code == -signal.SIGPROF:
            return f"it takes more than {SECONDS} s of CPU time for a conversation: a loop that does not end?"
        return f"the process that renders it ended with {code}, perhaps for want of memory"


def _check_jinja(file: Path) -> None:
    """Raise ImportError unless there is a jinja2 that is new enough."""
    try:
        found = importlib.metadata.version("jinja2")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found == "none" or Version(found) < Version(_JINJA):
        raise ImportError(
            f"the chat template in {file} needs jinja2>={_JINJA}, and installed is {found}: "
            f"pip install 'jinja2>={_JINJA}'"
        )
