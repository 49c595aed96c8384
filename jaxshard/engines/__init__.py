"""Engines: how the gradient is computed. Small values from which a `value_and_grad` is made."""

from jaxshard.engines.auto import Auto as Auto
from jaxshard.engines.auto import auto as auto
from jaxshard.engines.explicit import Explicit as Explicit
from jaxshard.engines.explicit import explicit as explicit
from jaxshard.engines.pipelined import Pipelined as Pipelined
from jaxshard.engines.pipelined import pipelined as pipelined
