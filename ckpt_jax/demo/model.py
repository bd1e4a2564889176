"""The model: a GPT that reads bytes, and says after each which one comes next."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from . import settings

# Shapes in the comments: B samples, T bytes of each, C channels, H heads of D = C / H channels.


class Attention(nnx.Module):
    """Each byte gathers from those before it what it needs."""

    def __init__(self, model: settings.Model, *, rngs: nnx.Rngs) -> None:
        self.heads = model.heads
        self.qkv = nnx.Linear(model.width, 3 * model.width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(model.width, model.width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        B, T, C = x.shape
        q, k, v = jnp.split(self.qkv(x).reshape(B, T, self.heads, -1), 3, axis=-1)  # B, T, H, D each
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(B, T, C))


class MLP(nnx.Module):
    """Each byte works by itself on what it has gathered."""

    def __init__(self, model: settings.Model, *, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(model.width, 4 * model.width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * model.width, model.width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))


class Block(nnx.Module):
    """Attention and MLP, each adding to the stream that runs past them."""

    def __init__(self, model: settings.Model, *, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.RMSNorm(model.width, rngs=rngs) for _ in range(2)])
        self.parts = nnx.List([Attention(model, rngs=rngs), MLP(model, rngs=rngs)])
        self.dropouts = nnx.List([nnx.Dropout(model.dropout, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for norm, part, dropout in zip(self.norms, self.parts, self.dropouts, strict=True):
            x = x + dropout(part(norm(x)))
        return x


class GPT(nnx.Module):
    """Embeddings, blocks, and back to bytes through the same embedding."""

    def __init__(self, model: settings.Model, *, rngs: nnx.Rngs) -> None:
        small = nnx.initializers.normal(0.02)
        self.bytes = nnx.Embed(model.vocabulary, model.width, embedding_init=small, rngs=rngs)
        self.places = nnx.Embed(model.context, model.width, embedding_init=small, rngs=rngs)
        self.blocks = nnx.List([Block(model, rngs=rngs) for _ in range(model.layers)])
        self.norm = nnx.RMSNorm(model.width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.bytes(tokens) + self.places(jnp.arange(tokens.shape[1]))  # B, T, C
        for block in self.blocks:
            x = block(x)
        return self.bytes.attend(self.norm(x))  # B, T, vocabulary


def loss(model: GPT, tokens: jax.Array) -> jax.Array:
    """Nats a byte, with tokens int[B, T + 1]; knowing nothing costs log(256) = 5.55."""
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def optimizer(model: GPT, train: settings.Train) -> nnx.Optimizer[GPT]:
    """AdamW on clipped gradients; the learning rate climbs in a line, and falls as a cosine."""
    rate = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=train.learning_rate,
        warmup_steps=train.warmup,
        decay_steps=train.steps,
        end_value=train.learning_rate / 10,
    )
    chain = optax.chain(optax.clip_by_global_norm(train.clip), optax.adamw(rate, weight_decay=train.weight_decay))
    return nnx.Optimizer(model, chain, wrt=nnx.Param)
