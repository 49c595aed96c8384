"""The cross-entropy of a language model's head, in chunks over the vocabulary, without an array of all logits.

For 8,192 tokens the head of an 8B model makes logits bf16[8192, 128256], 2.1 GB, and its gathered output matrix takes
another 1 GB on every device. Here only one chunk of the logits and of the matrix W exists at a time:

    forward     for each chunk: gather W[:, chunk]; logits = x W; update max, sum of exponentials, the label's own logit
    backward    for each chunk: gather W[:, chunk] again; logits = x W; dlogits = (softmax - label) * cotangent;
                dx += dlogits W^T; dW[:, chunk] = x^T dlogits, reduced over devices immediately

One loop computes both gradients, so the gradient of W is reduced before the backward pass of the blocks begins.

Shape suffixes: N labels (rows times positions), C width, V vocabulary, P parts into which a tensor axis splits the
vocabulary (1 without a tensor axis), W columns of a chunk in each part.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxshard.core.constrain import TOKENS, constrain, is_split, split_count
from jaxshard.core.loss import Loss, Mean
from jaxshard.core.marks import is_marking
from jaxshard.layers.cross_entropy import compute_nats, in_vocabulary, spoil
from jaxshard.layers.weight_chunks import Chunks, cut_weight, parts_in_use

_ONE_CHUNK = 2**25
"""The most logits on a device that are computed in one chunk: 128 MiB in f32."""
_NOWHERE = jnp.iinfo(jnp.int32).max
"""The index in the vocabulary for "no logit": larger than all others, so that a minimum over indices ignores it."""


def head_loss(
    x: Float[Array, "*batch width"],
    kernel: Float[Array, ...],
    labels: Int[Array, "*batch"],
    weights: Float[Array, ...] | None = None,
    *,
    tied: bool = False,
    chunks: int | None = None,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    accuracy: bool = False,
) -> Mean | Loss:
    """Compute the cross-entropy of labels under the logits `x @ kernel`, without the array of all logits.

    The vocabulary is split into chunks. The logits of each chunk are computed in f32 (from inputs in their own dtype),
    and recomputed in the backward pass, which costs one more matrix product of the head. With a single chunk the logits
    are saved instead, as in `js.cross_entropy`.

    If `kernel` is the parameter that the loss function received, neither cast nor computed, its chunks are gathered one
    at a time (under `js.auto` and `js.explicit`); else the gathered array is split into chunks. If a tensor axis splits
    the vocabulary, each device computes its own columns.

    Collectives: with several chunks, an all-gather of each chunk of a sharded kernel in the forward pass and again in
    the backward pass, and a reduce-scatter or all-reduce of its gradient, by the layout. If a tensor axis splits the
    vocabulary, also all-reduces of three scalars per label and one all-reduce of the gradient of `x`.

    Args:
      x: the normalized output of the last block.
      kernel: the output matrix [width, vocab], or with `tied` the embedding table [vocab, width].
      labels: integers from 0 to vocab - 1. The loss of any other label, such as -100, is NaN unless its weight is 0.
      weights: the weight of each label, which broadcasts to the shape of the labels; 1 by default. A label with weight
        0 is ignored: its loss and all of its gradients are 0, even if the label is out of range or `x` is NaN.
      tied: the kernel is an embedding table.
      chunks: the number of chunks; slightly fewer are used if that makes them equal. By default the fewest for which
        the logits of a chunk have at most twice as many elements as `x` on a device, or take at most 128 MiB.
      z_loss: adds `z_loss * log(sum of exp(logits))**2` to the loss of each label.
      soft_cap: replaces logits by `soft_cap * tanh(logits / soft_cap)`.
      accuracy: also report the fraction of labels with the largest logit (the first, if several are equal).

    Returns:
      A `js.Mean` of nats per label in f32; with `accuracy` a `js.Loss` with this mean and a metric "accuracy".

    Raises:
      ValueError: shapes or options that do not match; names them.

    References:
      Shoeybi et al. 2019, "Megatron-LM", section 3, for a vocabulary split over devices; Wijmans et al. 2024, "Cut Your
      Losses in Large-Vocabulary Language Models", for logits that are not saved; Chowdhery et al. 2022, "PaLM", section
      5, for the z-loss.

    Example:
      The head of a `js.Stacked` model:

        def head(params, x, batch, key):
            return js.head_loss(norm(params, x), params["head"]["kernel"], batch["labels"])
    """
    _check(x, kernel, labels, tied, chunks, z_loss, soft_cap)
    vocab_dim = 0 if tied else 1
    vocab = kernel.shape[vocab_dim]
    if weights is None:
        weights = jnp.ones(labels.shape, jnp.float32)
    else:
        weights = _broadcast(weights, labels.shape)
        # Mask x, not the loss: 0 times the gradient of a NaN or infinite value would be NaN.
        x = jnp.where(weights[..., None] == 0, 0, x)
    # Replace labels out of range: -1 would match the padding columns of a chunk, whose index is -1.
    labels = jnp.where(in_vocabulary(labels, vocab), jnp.asarray(labels, jnp.int32), _NOWHERE)
    weights, labels = (_devices_first(one, labels.shape) for one in (weights, labels))
    x_NC, labels_N = _devices_first(x, x.shape[:-1]).reshape(-1, x.shape[-1]), labels.reshape(-1)
    parts = parts_in_use(kernel, vocab_dim) or split_count("vocab", vocab)
    count = _default_count(x_NC, vocab // parts) if chunks is None else min(chunks, vocab // parts)
    if count == 1 or is_marking():
        nats_N, hits_N = _whole(x_NC, kernel.T if tied else kernel, labels_N, z_loss, soft_cap)
    else:
        cut, stored, sink = cut_weight(kernel, vocab_dim, count, parts)
        terms = _ChunkedHead(cut, parts, tied, soft_cap, accuracy).terms(x_NC, stored, sink, labels_N)
        nats_N, hits_N = terms.log_sum - terms.own + z_loss * terms.log_sum**2, terms.best == labels_N
    total = weights.sum()
    weights_N = weights.reshape(-1)
    nats_N = spoil((labels_N != _NOWHERE) | (weights_N == 0), nats_N)
    loss = Mean((nats_N * weights_N).sum(), total)
    return Loss(loss, metrics={"accuracy": Mean((hits_N * weights_N).sum(), total)}) if accuracy else loss


def _whole(
    x_NC: jax.Array, kernel_CV: jax.Array, labels_N: jax.Array, z_loss: float, soft_cap: float | None
) -> tuple[jax.Array, jax.Array]:
    """Compute all logits at once; return (the loss of each label, True for each label with the largest logit)."""
    is_f32 = jnp.result_type(x_NC, kernel_CV) == jnp.float32
    logits_NV = _cap(x_NC @ kernel_CV if is_f32 else _product(x_NC, kernel_CV), soft_cap)
    if is_split("vocab", logits_NV.shape[-1]):
        logits_NV = constrain(logits_NV, (TOKENS, "vocab"))
    nats_N = compute_nats(logits_NV, labels_N)
    if z_loss:
        nats_N = nats_N + z_loss * jax.nn.logsumexp(logits_NV, axis=-1) ** 2
    return nats_N, labels_N == logits_NV.argmax(axis=-1)


@jax.custom_vjp
def _product(x_NC: jax.Array, kernel_CV: jax.Array) -> jax.Array:
    """Compute x @ kernel in f32 from bf16 inputs, with gradients computed from bf16 inputs as well.

    JAX's own derivative would multiply f32 arrays in the backward pass, which is slower.
    """
    return jnp.matmul(x_NC, kernel_CV, preferred_element_type=jnp.float32)


def _product_forward(x_NC: jax.Array, kernel_CV: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x_NC, kernel_CV), (x_NC, kernel_CV)


def _product_backward(inputs: tuple[jax.Array, jax.Array], d_NV: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_NC, kernel_CV = inputs
    d_NV = d_NV.astype(jnp.result_type(x_NC, kernel_CV))
    dx_NC = jnp.matmul(d_NV, kernel_CV.T, preferred_element_type=x_NC.dtype)
    return dx_NC, jnp.matmul(x_NC.T, d_NV, preferred_element_type=kernel_CV.dtype)


_product.defvjp(_product_forward, _product_backward)


class _Terms(NamedTuple):
    """Three numbers for each of N labels, which give its loss and the accuracy.

    Attributes:
      log_sum: f32[N], the log of the sum of exp(logits) over the vocabulary.
      own: f32[N], the label's own logit; 0 for a label out of range.
      best: int32[N], the vocabulary index of the largest logit.
    """

    log_sum: jax.Array
    own: jax.Array
    best: jax.Array


class _Running(NamedTuple):
    """The carry of the loop over chunks of the vocabulary, an online softmax.

    All fields are [N, P], for N labels and the P parts into which a tensor axis splits the vocabulary.

    Attributes:
      most: the largest logit of the chunks so far.
      total: the sum of exp(logit - most).
      own: the label's own logit; 0 until its chunk comes.
      best: the first index of the largest logit; None if accuracy is not asked for.
    """

    most: jax.Array
    total: jax.Array
    own: jax.Array
    best: jax.Array | None


class _ChunkedHead(NamedTuple):
    """The head of a language model, computed in chunks of the vocabulary.

    Attributes:
      chunks: how the kernel is split into chunks.
      parts: P, the number of devices over which a tensor axis splits the vocabulary.
      tied: True if the kernel is [V, C], False if it is [C, V].
      soft_cap: the soft cap of the logits; None for none.
      with_best: True to find the index of the largest logit, for the accuracy.
    """

    chunks: Chunks
    parts: int
    tied: bool
    soft_cap: float | None
    with_best: bool

    def terms(self, x_NC: jax.Array, stored: jax.Array, sink: jax.Array | None, labels_N: jax.Array) -> _Terms:
        """Compute the logsumexp, own logit and best index of each label, chunk by chunk, with a custom backward pass.

        Args:
          x_NC: the output of the last block.
          stored: the kernel as it is stored, from which chunks are gathered.
          sink: an array whose gradient will be the gradient of the kernel, reduced over devices; its values are not
            used. None if the kernel is frozen.
          labels_N: the labels.
        """
        like = None if sink is None else jax.ShapeDtypeStruct(sink.shape, sink.dtype)

        # A custom_vjp: JAX's own rule would save the logits of every chunk, and sum the gradients of `x` in its dtype.
        @jax.custom_vjp
        def run(x_NC: jax.Array, stored: jax.Array, sink: Any, labels_N: jax.Array) -> _Terms:
            return self._forward(x_NC, stored, labels_N)

        def forward(x_NC: jax.Array, stored: jax.Array, sink: Any, labels_N: jax.Array) -> tuple[_Terms, Any]:
            terms = self._forward(x_NC, stored, labels_N)
            return terms, (x_NC, stored, labels_N, terms.log_sum)

        def backward(saved: Any, cotangents: _Terms) -> tuple[Any, ...]:
            dx_NC, gradient = self._backward(saved, cotangents, like)
            return dx_NC, None, gradient, None

        run.defvjp(forward, backward)
        return run(x_NC, stored, sink, labels_N)

    def _forward(self, x_NC: jax.Array, stored: jax.Array, labels_N: jax.Array) -> _Terms:
        def add(before: _Running, index: jax.Array) -> tuple[_Running, None]:
            numbers_PW = self._numbers(index)
            logits_NPW = self._logits(x_NC, self._weight(stored, index), numbers_PW)
            most = jnp.maximum(before.most, logits_NPW.max(-1))
            total = before.total * jnp.exp(before.most - most) + jnp.exp(logits_NPW - most[..., None]).sum(-1)
            own = before.own + jnp.where(numbers_PW == labels_N[:, None, None], logits_NPW, 0).sum(-1)
            best = before.best
            if best is not None:
                first = jnp.where(logits_NPW == most[..., None], numbers_PW, _NOWHERE).min(-1)
                best = jnp.where(most > before.most, first, jnp.minimum(best, first))
            return _Running(most, total, own, best), None

        zeros = jnp.zeros((len(labels_N), self.parts), jnp.float32)
        best = jnp.full(zeros.shape, _NOWHERE, jnp.int32) if self.with_best else None
        # The lowest finite value, not -inf: if all columns of a part are padding, -inf - -inf would be NaN.
        lowest = jnp.full(zeros.shape, jnp.finfo(jnp.float32).min)
        found, _ = lax.scan(add, _Running(lowest, zeros, zeros, best), jnp.arange(self.chunks.count))
        # Combine the parts of the vocabulary once, after the loop: this all-reduces over the tensor axis.
        most_N = found.most.max(-1)
        total_N = (found.total * jnp.exp(found.most - most_N[:, None])).sum(-1)
        best_N = jnp.zeros(labels_N.shape, jnp.int32)
        if found.best is not None:
            best_N = jnp.where(found.most == most_N[:, None], found.best, _NOWHERE).min(-1)
        return _Terms(jnp.log(total_N) + most_N, found.own.sum(-1), best_N)

    def _backward(
        self, saved: tuple[jax.Array, ...], cotangents: _Terms, sink: jax.ShapeDtypeStruct | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return (the gradient of `x_NC`, the gradient of the kernel, reduced over devices), computed chunk by chunk.

        The second is None if the kernel is frozen.

        Args:
          saved: the residuals of the forward pass.
          cotangents: the gradients with respect to the results of the forward pass.
          sink: shape and dtype of the kernel's gradient; None if the kernel is frozen.
        """
        x_NC, stored, labels_N, log_sum_N = saved
        labels_N11, log_sum_N11, d_log_sum_N11, d_own_N11 = (
            one[:, None, None] for one in (labels_N, log_sum_N, cotangents.log_sum, cotangents.own)
        )

        def add(sums: tuple[jax.Array, Any], index: jax.Array) -> tuple[tuple[jax.Array, Any], None]:
            dx_PNC, gradient = sums
            numbers_PW, weight = self._numbers(index), self._weight(stored, index)
            logits_NPW = self._logits(x_NC, weight, numbers_PW)
            d_NPW = d_log_sum_N11 * jnp.exp(logits_NPW - log_sum_N11)
            d_NPW += jnp.where(numbers_PW == labels_N11, d_own_N11, 0)
            if self.soft_cap is not None:
                d_NPW *= jnp.where(numbers_PW < 0, 0, 1 - (logits_NPW / self.soft_cap) ** 2)
            d_NPW = d_NPW.astype(jnp.result_type(x_NC, weight))
            new = jnp.einsum(f"npw,{self._letters}->pnc", d_NPW, weight, preferred_element_type=jnp.float32)
            if gradient is not None:
                d_weight = jnp.einsum(f"nc,npw->{self._letters}", x_NC, d_NPW, preferred_element_type=weight.dtype)
                gradient = self.chunks.add(gradient, self._join(d_weight), index)
            return (self._constrain_partial(dx_PNC + new), gradient), None

        dx_PNC = self._constrain_partial(jnp.zeros((self.parts, *x_NC.shape), jnp.float32))
        zeros = None if sink is None else self.chunks.zeros(sink)
        (dx_PNC, gradient), _ = lax.scan(add, (dx_PNC, zeros), jnp.arange(self.chunks.count))
        if sink is not None and gradient is not None:
            gradient = self.chunks.finish(gradient, sink)
        return dx_PNC.sum(0).astype(x_NC.dtype), gradient

    def _numbers(self, index: jax.Array) -> jax.Array:
        """Return the vocabulary indices of the logits in chunk `index`, int32[P, W].

        A tensor axis splits the vocabulary into P parts, and a chunk has W indices of each part. The index is -1 for
        padding.
        """
        return self.chunks.numbers(index).reshape(self.parts, -1)

    def _weight(self, stored: jax.Array, index: jax.Array) -> jax.Array:
        """Gather chunk `index` of the kernel, with a dimension for the P parts of the vocabulary.

        The shape is [C, P, W], or [P, W, C] if the kernel is tied.
        """
        weight, dim = self.chunks.take(stored, index), self.chunks.dim
        return weight.reshape(*weight.shape[:dim], self.parts, -1, *weight.shape[dim + 1 :])

    def _join(self, weight: jax.Array) -> jax.Array:
        """Merge the dimensions P and W of a chunk of the kernel: [C, P, W] -> [C, P * W].

        If the kernel is tied: [P, W, C] -> [P * W, C].
        """
        dim = self.chunks.dim
        return weight.reshape(*weight.shape[:dim], -1, *weight.shape[dim + 2 :])

    def _logits(self, x_NC: jax.Array, weight: jax.Array, numbers_PW: jax.Array) -> jax.Array:
        logits_NPW = jnp.einsum(f"nc,{self._letters}->npw", x_NC, weight, preferred_element_type=jnp.float32)
        if is_split("vocab", self.parts):
            logits_NPW = constrain(logits_NPW, (TOKENS, "vocab", None))
        return jnp.where(numbers_PW < 0, -jnp.inf, _cap(logits_NPW, self.soft_cap))

    def _constrain_partial(self, dx_PNC: jax.Array) -> jax.Array:
        return constrain(dx_PNC, ("vocab" if is_split("vocab", self.parts) else None, TOKENS, None))

    @property
    def _letters(self) -> str:
        return "pwc" if self.tied else "cpw"


def _devices_first(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Flatten rows and positions, [B, T, ...] -> [B * T, ...], so that the entries of each device are contiguous.

    This is needed if the compiler splits the positions, because after a plain reshape a device's entries would not be
    contiguous, which no sharding of one dimension can express. If positions are not split, return `x` unchanged.

    Args:
      x: the array.
      shape: (B, T).
    """
    B, T = shape if len(shape) == 2 else (1, 1)
    over_rows, over_positions = split_count("batch", B), split_count("context", T)
    if over_positions == 1:
        return x
    parts = x.reshape(over_rows, B // over_rows, over_positions, T // over_positions, *x.shape[2:]).swapaxes(1, 2)
    merged = parts.reshape(B * T, *x.shape[2:])
    return constrain(merged, (TOKENS, *(None,) * (merged.ndim - 1)))


def _cap(logits: jax.Array, soft_cap: float | None) -> jax.Array:
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def _default_count(x_NC: jax.Array, vocab: int) -> int:
    """Return the number of chunks into which `head_loss` splits the vocabulary by default.

    Args:
      x_NC: the output of the last block.
      vocab: the number of columns that each device computes.
    """
    N, C = x_NC.shape
    N = max(1, N // split_count(TOKENS, N))
    # Columns per chunk: N x 2 C logits are twice as large as x, and N x (_ONE_CHUNK / N) logits are always allowed.
    return -(-vocab // max(2 * C, _ONE_CHUNK // N))


def _check(
    x: jax.Array,
    kernel: jax.Array,
    labels: jax.Array,
    tied: bool,
    chunks: int | None,
    z_loss: float,
    soft_cap: float | None,
) -> None:
    if labels.shape != x.shape[:-1] or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"head_loss: x [..., C] needs integer labels [...], got {x.dtype}{list(x.shape)} and "
            f"{labels.dtype}{list(labels.shape)}"
        )
    if kernel.ndim != 2 or kernel.shape[int(tied)] != x.shape[-1]:
        shape, other = ("[V, C]", "[C, V]") if tied else ("[C, V]", "[V, C]")
        raise ValueError(
            f"head_loss: x {list(x.shape)} needs a kernel {shape} with C = {x.shape[-1]}, got {list(kernel.shape)}; of "
            f"a kernel {other} pass tied={not tied}"
        )
    if chunks is not None and (isinstance(chunks, bool) or not isinstance(chunks, Integral) or chunks < 1):
        raise ValueError(f"head_loss: chunks must be a whole number from 1 on, got {chunks!r}")
    if z_loss < 0 or (soft_cap is not None and soft_cap <= 0):
        raise ValueError(
            f"head_loss: z_loss must not be negative and soft_cap be positive, got {z_loss!r} and {soft_cap!r}"
        )


def _broadcast(weights: Any, shape: tuple[int, ...]) -> jax.Array:
    try:
        return jnp.broadcast_to(jnp.asarray(weights, jnp.float32), shape)
    except ValueError:
        raise ValueError(
            f"head_loss: weights {list(jnp.shape(weights))} do not broadcast to the labels {list(shape)}"
        ) from None
