"""`jaxshard profile`: print where the time of profiled steps went."""

from __future__ import annotations

from jaxshard.commands.errors import usage_errors
from jaxshard.commands.flags import Profile
from jaxshard.commands.json_object import write_json
from jaxshard.commands.terminal import facts, printable, start
from jaxshard.profile.read import read_profile


def run(flags: Profile) -> None:
    """Print the tables of the newest trace in a folder."""
    console = start(flags)
    with usage_errors():
        profile = read_profile(flags.folder)
    facts(console, {"trace": profile.file} | ({"made by": f"JAX {profile.version}"} if profile.version else {}))
    for section in profile.sections(flags.top):
        for line in ("", section.title, *section.lines):
            console.print(printable(line))
    write_json(flags.json, profile.as_dict())
