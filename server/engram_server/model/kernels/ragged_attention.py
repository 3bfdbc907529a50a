"""Attention of task rows as one Triton kernel for GPUs: no padding, no stored weights.

The rows of an image are adjacent. A program takes a block of them in one head, runs through the
keys of their image in blocks (tensor cores), then through the keys of each row: its lineage and the
memory of its task, one at a time. The softmax is updated online, in float32.

`masked_pass` has the same in plain torch, with gradients and for any device. This file needs
Triton, which GPU builds of torch include.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows and keys of one block: the minimum of tensor cores, and what fits into registers.
BLOCK_ROWS: Final = 16
BLOCK_TOKENS: Final = 32
_LEAST_WIDTH: Final = 16


# Sizes that change between passes are not specialised: each value would be compiled again.
@triton.jit(do_not_specialize=["tokens", "members", "memory"])
def _attend(
    out: tl.tensor,  # (R, H, d), contiguous
    queries: tl.tensor,  # (R, H, d), the heads of a row adjacent
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
    query_row: tl.tensor,  # strides between rows
    own_row: tl.tensor,
    key_image: tl.tensor,  # strides between images, heads and tokens
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
    valid = rows < end
    across = tl.arange(0, BLOCK_WIDTH)[None, :]
    inside = valid[:, None] & (across < WIDTH)
    within = head * WIDTH + across
    query = tl.load(queries + rows[:, None] * query_row + within, mask=inside, other=0.0)
    image_key = image_keys + image * key_image + head * key_head + across
    image_value = image_values + image * value_image + head * value_head + across
    state = _attend_image(
        *(query, image_key, image_value, key_token, value_token, tokens, scale),
        *(across < WIDTH, BLOCK_ROWS, BLOCK_WIDTH, BLOCK_TOKENS),
    )
    state = _attend_lineage(
        *(query, keys + within, values + within, lineage, lineage_bias),
        *(rows, valid, inside, own_row, members, scale, state),
    )
    task = tl.load(tasks + rows, mask=valid, other=0)
    index = ((task * tl.num_programs(1) + head) * memory)[:, None] * WIDTH + across
    _, total, acc = _attend_memory(
        *(query, memory_keys + index, memory_values + index, memory_bias),
        *(task, valid, inside, memory, scale, state, WIDTH),
    )
    of_rows = out + rows[:, None] * (tl.num_programs(1) * WIDTH) + within
    tl.store(of_rows, acc / total[:, None], mask=inside)


@triton.jit
def _attend_image(
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
    """Return the largest score, the sum of the weights and the weighted values (acc)."""
    largest = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    acc = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), tl.float32)
    for start in range(0, tokens, BLOCK_TOKENS):
        token = start + tl.arange(0, BLOCK_TOKENS)
        loaded = (token < tokens)[:, None] & wide
        key = tl.load(keys + token[:, None] * key_token, mask=loaded, other=0.0)
        value = tl.load(values + token[:, None] * value_token, mask=loaded, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where((token < tokens)[None, :], scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        rescale = tl.exp(largest - higher)
        total = total * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        acc += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        largest = higher
    return largest, total, acc


@triton.jit
def _attend_lineage(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    lineage: tl.tensor,
    lineage_bias: tl.tensor,
    rows: tl.tensor,
    valid: tl.tensor,
    inside: tl.tensor,
    own_row: tl.tensor,
    members: tl.tensor,
    scale: tl.tensor,
    state: tl.tuple,
) -> tl.tuple:
    """Add the keys of the row itself and of its ancestors."""
    largest, total, acc = state
    for member in range(members):
        row = rows
        bias = tl.zeros_like(largest)
        if lineage is not None:
            row = tl.load(lineage + rows * members + member, mask=valid, other=0)
            bias += tl.load(lineage_bias + rows * members + member, mask=valid, other=0.0)
        key = tl.load(keys + row[:, None] * own_row, mask=inside, other=0.0)
        value = tl.load(values + row[:, None] * own_row, mask=inside, other=0.0)
        largest, total, acc = _attend_key(query, key, value, bias, scale, largest, total, acc)
    return largest, total, acc


@triton.jit
def _attend_memory(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    memory_bias: tl.tensor,
    task: tl.tensor,
    valid: tl.tensor,
    inside: tl.tensor,
    memory: tl.tensor,
    scale: tl.tensor,
    state: tl.tuple,
    WIDTH: tl.constexpr,
) -> tl.tuple:
    largest, total, acc = state
    for index in range(memory):
        bias = tl.zeros_like(largest)
        if memory_bias is not None:
            bias += tl.load(memory_bias + task * memory + index, mask=valid, other=0.0)
        key = tl.load(keys + index * WIDTH, mask=inside, other=0.0)
        value = tl.load(values + index * WIDTH, mask=inside, other=0.0)
        largest, total, acc = _attend_key(query, key, value, bias, scale, largest, total, acc)
    return largest, total, acc


@triton.jit
def _attend_key(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    bias: tl.tensor,
    scale: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
) -> tl.tuple:
    """Update the online softmax with one key per row."""
    score = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1) * scale + bias
    higher = tl.maximum(largest, score)
    weight = tl.exp(score - higher)
    rescale = tl.exp(largest - higher)
    acc = acc * rescale[:, None] + weight[:, None] * value.to(tl.float32)
    return higher, total * rescale + weight, acc


def attend_ragged(
    out: Tensor,  # (R, H, d): the result for the rows of these images
    task: tuple[Tensor, Tensor, Tensor],  # queries, keys, values of all rows, (R, H, d)
    image: tuple[Tensor, Tensor],  # keys, values of the images, (images, H, S, d)
    memory: tuple[Tensor, Tensor, Tensor | None] | None,  # (T, H, M, d) twice; bias (T, 1, M)
    lineage: tuple[Tensor, Tensor] | None,  # rows (R, A); bias (R, 1, A)
    *,
    starts: Tensor,  # (images + 1,): the first row of each image, and the row after the last
    widest: int,  # the most rows of an image
    tasks: Tensor,  # (R,): the index of each row's task in the memory
) -> None:
    """Run attention of task rows over their image, lineage and memory, into `out`."""
    queries, keys, values = task
    images, heads, tokens, width = image[0].shape
    assert queries.stride(1) == keys.stride(1) == values.stride(1) == width
    assert keys.stride(0) == values.stride(0)
    memory_keys, memory_values, memory_bias = memory or (out, out, None)  # never read
    lines, lineage_bias = lineage or (None, None)
    flat = (out, memory_keys, memory_values, memory_bias, starts, tasks, lines, lineage_bias)
    assert all(tensor is None or tensor.is_contiguous() for tensor in flat)
    with torch.cuda.device(queries.get_device()):  # Triton launches on the current one
        _attend[(images, heads, triton.cdiv(widest, BLOCK_ROWS))](
            *(out, *task, *image, memory_keys, memory_values, memory_bias),
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
    """Compile and run every form of the kernel; raise the error if one fails."""
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
        torch.cuda.synchronize(device)  # raises errors of the kernel here
