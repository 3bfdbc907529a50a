"""Attention of task rows in one kernel, for GPUs: no padding, nothing written but what rows take.

The rows of an image lie side by side, so a program takes some of them, in one head, through the
keys of their image in blocks (tensor cores), and then through what each row has for itself: its
lineage and its task's memory, a key at a time. The softmax is kept up as keys come, in float32.

`masked_pass` has the same in plain torch: it has gradients and runs anywhere. This file needs
Triton, which torch brings along where it is built for GPUs.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows and keys of one block: what tensor cores take at least, and what registers hold.
BLOCK_ROWS: Final = 16
BLOCK_TOKENS: Final = 32
_LEAST_WIDTH: Final = 16


# Sizes that change from pass to pass are not compiled in: each would be compiled anew.
@triton.jit(do_not_specialize=["tokens", "members", "memory"])
def _attend(
    taken: tl.tensor,  # (R, H, d), contiguous
    queries: tl.tensor,  # (R, H, d), the heads of a row side by side
    keys: tl.tensor,
    values: tl.tensor,
    image_keys: tl.tensor,  # (images, H, S, d)
    image_values: tl.tensor,
    memory_keys: tl.tensor,  # (T, H, M, d), contiguous
    memory_values: tl.tensor,
    memory_bias: tl.tensor,  # (T, 1, M) or None
    starts: tl.tensor,  # (images + 1,)
    tasks: tl.tensor,  # (R,)
    lineage: tl.tensor,  # (R, A) or None
    lineage_bias: tl.tensor,  # (R, 1, A) or None
    scale: tl.tensor,
    tokens: tl.tensor,
    members: tl.tensor,
    memory: tl.tensor,
    query_row: tl.tensor,  # steps from a row to the next
    own_row: tl.tensor,
    key_image: tl.tensor,  # steps from an image, a head and a token to the next
    key_head: tl.tensor,
    key_token: tl.tensor,
    value_image: tl.tensor,
    value_head: tl.tensor,
    value_token: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    image, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(starts + image) + tl.program_id(2) * BLOCK_ROWS
    end = tl.load(starts + image + 1)
    if first >= end:
        return
    rows = first + tl.arange(0, BLOCK_ROWS)
    real = rows < end
    across = tl.arange(0, BLOCK_WIDTH)[None, :]
    inside = real[:, None] & (across < WIDTH)
    within = head * WIDTH + across
    query = tl.load(queries + rows[:, None] * query_row + within, mask=inside, other=0.0)
    of_image = image_keys + image * key_image + head * key_head + across
    and_values = image_values + image * value_image + head * value_head + across
    state = _take_image(
        *(query, of_image, and_values, key_token, value_token, tokens, scale),
        *(across < WIDTH, BLOCK_ROWS, BLOCK_WIDTH, BLOCK_TOKENS),
    )
    state = _take_lineage(
        *(query, keys + within, values + within, lineage, lineage_bias),
        *(rows, real, inside, own_row, members, scale, state),
    )
    task = tl.load(tasks + rows, mask=real, other=0)
    place = ((task * tl.num_programs(1) + head) * memory)[:, None] * WIDTH + across
    _, total, mixed = _take_memory(
        *(query, memory_keys + place, memory_values + place, memory_bias),
        *(task, real, inside, memory, scale, state, WIDTH),
    )
    of_rows = taken + rows[:, None] * (tl.num_programs(1) * WIDTH) + within
    tl.store(of_rows, mixed / total[:, None], mask=inside)


@triton.jit
def _take_image(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_token: tl.tensor,
    value_token: tl.tensor,
    tokens: tl.tensor,
    scale: tl.tensor,
    wide: tl.tensor,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> tl.tuple:
    """Of the keys so far: the largest score, the sum of the weights, and what they take."""
    largest = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    mixed = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), tl.float32)
    for start in range(0, tokens, BLOCK_TOKENS):
        token = start + tl.arange(0, BLOCK_TOKENS)
        there = (token < tokens)[:, None] & wide
        key = tl.load(keys + token[:, None] * key_token, mask=there, other=0.0)
        value = tl.load(values + token[:, None] * value_token, mask=there, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where((token < tokens)[None, :], scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        fade = tl.exp(largest - higher)
        total = total * fade + tl.sum(weights, 1)
        mixed = mixed * fade[:, None]
        mixed += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        largest = higher
    return largest, total, mixed


@triton.jit
def _take_lineage(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    lineage: tl.tensor,
    lineage_bias: tl.tensor,
    rows: tl.tensor,
    real: tl.tensor,
    inside: tl.tensor,
    own_row: tl.tensor,
    members: tl.tensor,
    scale: tl.tensor,
    state: tl.tuple,
) -> tl.tuple:
    """A row itself, and the rows of its ancestors."""
    largest, total, mixed = state
    for member in range(members):
        row = rows
        bias = tl.zeros_like(largest)
        if lineage is not None:
            row = tl.load(lineage + rows * members + member, mask=real, other=0)
            bias += tl.load(lineage_bias + rows * members + member, mask=real, other=0.0)
        key = tl.load(keys + row[:, None] * own_row, mask=inside, other=0.0)
        value = tl.load(values + row[:, None] * own_row, mask=inside, other=0.0)
        largest, total, mixed = _take_one(query, key, value, bias, scale, largest, total, mixed)
    return largest, total, mixed


@triton.jit
def _take_memory(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    memory_bias: tl.tensor,
    task: tl.tensor,
    real: tl.tensor,
    inside: tl.tensor,
    memory: tl.tensor,
    scale: tl.tensor,
    state: tl.tuple,
    WIDTH: tl.constexpr,
) -> tl.tuple:
    largest, total, mixed = state
    for place in range(memory):
        bias = tl.zeros_like(largest)
        if memory_bias is not None:
            bias += tl.load(memory_bias + task * memory + place, mask=real, other=0.0)
        key = tl.load(keys + place * WIDTH, mask=inside, other=0.0)
        value = tl.load(values + place * WIDTH, mask=inside, other=0.0)
        largest, total, mixed = _take_one(query, key, value, bias, scale, largest, total, mixed)
    return largest, total, mixed


@triton.jit
def _take_one(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    bias: tl.tensor,
    scale: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
) -> tl.tuple:
    """One more key for every row, each its own."""
    score = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1) * scale + bias
    higher = tl.maximum(largest, score)
    weight = tl.exp(score - higher)
    fade = tl.exp(largest - higher)
    mixed = mixed * fade[:, None] + weight[:, None] * value.to(tl.float32)
    return higher, total * fade + weight, mixed


def attend_ragged(
    taken: Tensor,  # (R, H, d): where the rows of these images are written
    own: tuple[Tensor, Tensor, Tensor],  # queries, keys, values of all rows, (R, H, d)
    image: tuple[Tensor, Tensor],  # keys, values of the images, (images, H, S, d)
    memory: tuple[Tensor, Tensor, Tensor | None] | None,  # (T, H, M, d) twice; bias (T, 1, M)
    lineage: tuple[Tensor, Tensor] | None,  # rows (R, A); bias (R, 1, A)
    *,
    starts: Tensor,  # (images + 1,): the first row of each image, and the row after the last
    widest: int,  # the most rows of an image
    tasks: Tensor,  # (R,): the place of each row's task in the memory
) -> None:
    """What rows take from their image, their lineage and their memory."""
    queries, keys, values = own
    images, heads, tokens, width = image[0].shape
    assert queries.stride(1) == keys.stride(1) == values.stride(1) == width
    assert keys.stride(0) == values.stride(0)
    memory_keys, memory_values, memory_bias = memory or (taken, taken, None)  # nothing is read
    lines, lineage_bias = lineage or (None, None)
    flat = (taken, memory_keys, memory_values, memory_bias, starts, tasks, lines, lineage_bias)
    assert all(tensor is None or tensor.is_contiguous() for tensor in flat)
    with torch.cuda.device(queries.get_device()):  # Triton launches on the current one
        _attend[(images, heads, triton.cdiv(widest, BLOCK_ROWS))](
            *(taken, *own, *image, memory_keys, memory_values, memory_bias),
            *(starts, tasks, lines, lineage_bias),
            *(width**-0.5, tokens, 1 if lines is None else lines.shape[1]),
            0 if memory is None else memory_keys.shape[2],
            *(queries.stride(0), keys.stride(0)),
            *(step for tensor in image for step in tensor.stride()[:3]),
            WIDTH=width,
            BLOCK_WIDTH=max(_LEAST_WIDTH, triton.next_power_of_2(width)),
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_TOKENS=BLOCK_TOKENS,
        )


def try_kernel(device: torch.device, dtype: torch.dtype, width: int) -> None:
    """Compiles and runs every form of the kernel; raises what keeps it from running."""
    rows = torch.zeros(1, 3, 1, width, device=device, dtype=dtype)
    queries, keys, values = rows.unbind(1)
    of_image = torch.zeros(1, 1, 1, width, device=device, dtype=dtype)
    number = torch.zeros(1, device=device, dtype=torch.int64)
    bias = torch.zeros(1, 1, 1, device=device, dtype=dtype)
    for memory_bias in (None, bias):
        for lineage in (None, (number[None], bias)):
            attend_ragged(
                torch.empty_like(of_image[0]),
                (queries, keys, values),
                (of_image, of_image),
                (of_image, of_image, memory_bias),
                lineage,
                starts=torch.arange(2, device=device),
                widest=1,
                tasks=number,
            )
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # what fails there is told here
