"""Traces written by hand, with the names of planes, lines and values that XLA gives them on each kind of device."""

from pathlib import Path

from jax.profiler import ProfileData

Timed = tuple[str, float, float, dict[str, int | str]]
"""An event: its name, start and end in microseconds, and its values."""


def event(name: str, start: float, end: float, **stats: int | str) -> Timed:
    return name, start, end, stats


def write(
    file: Path, planes: dict[str, dict[str, list[Timed]]], *, version: str = "0.10.2", module: bytes = b"other"
) -> Path:
    """Write a trace: {plane: {line: events}}, by a host with this version of JAX.

    `module` is the serialized HloModuleProto of its program "jit_step(6)"; by default one that no XLA can read, as if
    of another version.
    """
    program = "".join(f"\\{byte:03o}" for byte in b"\n" + _varint(len(module)) + module)  # field 1 of an HloProto
    text = "\n".join(_plane(name, lines) for name, lines in planes.items())
    text += f"""
        planes {{
          name: "/host:metadata"
          stats {{ metadata_id: 1 str_value: "{version}" }}
          stat_metadata {{ key: 1 value {{ id: 1 name: "jax_version" }} }}
          event_metadata {{
            key: 6
            value {{ id: 6 name: "jit_step(6)" stats {{ metadata_id: 2 bytes_value: "{program}" }} }}
          }}
          stat_metadata {{ key: 2 value {{ id: 2 name: "Hlo Proto" }} }}
        }}"""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return file


def _varint(number: int) -> bytes:
    last = number < 128
    return bytes([number]) if last else bytes([number % 128 + 128]) + _varint(number // 128)


def _plane(plane: str, lines: dict[str, list[Timed]]) -> str:
    events = sorted({name for of in lines.values() for name, *_ in of})
    values = sorted({name for of in lines.values() for *_, stats in of for name in stats})
    text = [f'planes {{ name: "{plane}"']
    for name, of in lines.items():
        text.append(f'lines {{ name: "{name}"')
        for one, start, end, stats in of:
            times = f"offset_ps: {round(start * 1e6)} duration_ps: {round((end - start) * 1e6)}"
            text.append(f"events {{ metadata_id: {events.index(one) + 1} {times}")
            for stat, value in stats.items():
                shown = f'str_value: "{value}"' if isinstance(value, str) else f"int64_value: {value}"
                text.append(f"stats {{ metadata_id: {values.index(stat) + 1} {shown} }}")
            text.append("}")
        text.append("}")
    for field, names in (("event_metadata", events), ("stat_metadata", values)):
        text += [f'{field} {{ key: {at} value {{ id: {at} name: "{one}" }} }}' for at, one in enumerate(names, 1)]
    return "\n".join([*text, "}"])
