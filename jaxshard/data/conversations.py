"""Write a conversation as text, and find in it what the assistant says, which a model is to learn.

A conversation is {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}. A line
such as "{role}:\\n{content}\\n" writes each message, or the chat template of a tokenizer all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxshard.data.chat_template import Messages, Renderer

TEMPLATE = "{role}:\n{content}\n"
"""The default line for a message in a conversation."""

ANSWERING = ("assistant", "model")
"""The roles in a conversation whose messages are answers."""

Spans = tuple[tuple[int, int], ...]
"""(begin, end) of answers, as indices of characters of a text, in order."""


class ByLine:
    """Write a conversation by a line of text for each message, in which {role} and {content} are replaced.

    Args:
      line: the line.

    Raises:
      ValueError: a line without {content}, or with more than one.
    """

    def __init__(self, line: str = TEMPLATE) -> None:
        head, *tails = line.split("{content}")
        if len(tails) != 1:
            raise ValueError(f"template {line!r}: say {{content}} once, and {{role}} where it stands: {TEMPLATE!r}")
        self._head, self._tail = head, tails[0]

    def __call__(self, record: Mapping[str, Any]) -> tuple[str, Spans]:
        """Write a conversation; return the text and its answers.

        An answer is the content of a message, and the line's text after it.
        """
        text, answers = "", []
        for number, message in enumerate(_check_messages(record["messages"], ("role", "content"))):
            name = f'"messages"[{number}]'
            if extra := [key for key, value in message.items() if key not in ("role", "content") and value]:
                raise ValueError(f"{name} has {extra[0]!r}, which no template of {{role}} and {{content}} writes")
            role, content = message["role"], check_text(message["content"], f'{name}["content"]')
            text += self._head.replace("{role}", role)
            begin = len(text)
            text += content + self._tail.replace("{role}", role)
            if role in ANSWERING:
                if not content:
                    raise ValueError(f'{name}["content"] is empty, so that there is nothing to learn; leave it out')
                answers.append((begin, len(text)))
        return text, tuple(answers)


class ByChatTemplate:
    """Write a conversation by the chat template of a tokenizer.

    Args:
      renderer: the running process that renders the template.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def __call__(self, record: Mapping[str, Any]) -> tuple[str, Spans]:
        """Write a conversation with its "tools", if it has some; return the text and its answers.

        Answers are what the template marks by `{% generation %}`, or else what it writes for the assistant's messages.
        """
        messages, tools = _check_messages(record["messages"], ("role",)), record.get("tools")
        text, marked = self._renderer.render(messages, tools)
        check_text(text, "the rendered conversation")
        return text, marked or self._find_answers(messages, tools, text)

    def _find_answers(self, messages: Messages, tools: Any, text: str) -> Spans:
        """Find the assistant's messages in the text of a conversation, by rendering what comes before and up to each.

        Raises:
          ValueError: the template writes the beginning of a conversation differently when more follows.
        """
        answers = []
        for number, message in enumerate(messages):
            if message["role"] in ANSWERING:
                before = self._renderer.render(messages[:number], tools, add_generation_prompt=True).text
                until = self._renderer.render(messages[: number + 1], tools).text
                if not (text.startswith(until) and until.startswith(before)):
                    raise ValueError(
                        f'the chat template does not write "messages"[{number}] as a continuation of what comes '
                        "before, or changes it when more follows, so its tokens can't be told from the others; put "
                        "{% generation %} ... {% endgeneration %} around the assistant's text in the template, or "
                        "give a line as template= (--template)"
                    )
                answers.append((len(before), len(until)))
        return tuple(answers)


def _check_messages(messages: Any, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the messages of a conversation; raise ValueError unless each has these keys, and one is an answer."""
    if not isinstance(messages, list) or not messages:
        raise ValueError('"messages" must be a list of at least one {"role": ..., "content": ...}')
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not message.keys() >= {*keys}:
            raise ValueError(f'"messages"[{number}] must be {{"role": ..., "content": ...}}')
        check_text(message["role"], f'"messages"[{number}]["role"]')
    if not any(message["role"] in ANSWERING for message in messages):
        raise ValueError('no message is of the role "assistant" (or "model"), so that there is nothing to learn')
    return messages


def check_text(value: Any, name: str) -> str:
    """Return a value that is text; raise ValueError with the name of any other."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} has half of a character (a lone surrogate), which is no text") from error
    return value
