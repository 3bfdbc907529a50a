"""The kernel for task rows, in Triton's interpreter, and compiled for GPUs that are not here."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from engram_server.model import MultiTaskViT, masked_pass
from engram_server.model.kernels import dispatch
from engram_server.model.kernels.ragged_attention import (
    BLOCK_ROWS,
    BLOCK_TOKENS,
    attend_ragged,
    try_kernel,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from triton import language as tl
from triton.runtime import interpreter

from tests.families import image_batch
from tests.model.tasks import add_all, assert_same, random_task, some_tasks
from tests.reference.dense import dense_forward

TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@pytest.fixture(autouse=True, scope="module")
def products_of_bfloat16():
    """Triton 3.7's interpreter multiplies the bits of bfloat16 as if they were numbers."""
    original = interpreter.InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return original(self, widened(a), widened(b), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield


@pytest.fixture
def kernel_everywhere(monkeypatch):
    """Passes on the CPU take the kernel; the list says how often."""
    calls = []

    def count(*arguments, **named):
        calls.append(arguments)
        attend_ragged(*arguments, **named)

    monkeypatch.setattr(masked_pass, "ragged_attention", lambda like: count)
    return calls


@st.composite
def ragged(draw):
    """Rows of some images, each of a task, some with ancestors, and how wide all of it is."""
    rows_of_image = draw(st.lists(st.sampled_from([0, 1, 2, 3, BLOCK_ROWS + 1]), min_size=1))
    return {
        "rows_of_image": rows_of_image[:3] if sum(rows_of_image[:3]) else [1],
        "heads": draw(st.integers(1, 2)),
        "width": draw(st.sampled_from([4, 16, 20, 64, 72])),
        "tokens": draw(st.sampled_from([1, 5, BLOCK_TOKENS, BLOCK_TOKENS + 1])),
        "tasks": draw(st.integers(1, 3)),
        "memory": draw(st.integers(0, 4)),
        "members": draw(st.integers(1, 3)),
        "dtype": draw(st.sampled_from(list(TOLERANCES))),
        "seed": draw(st.integers(0, 1000)),
    }


class Rows:
    """Random rows of a shape, for the kernel and for the sum over keys as it is written."""

    def __init__(self, rows_of_image, heads, width, tokens, tasks, memory, members, dtype, seed):
        random = torch.Generator().manual_seed(seed)

        def noise(*shape):
            return torch.randn(*shape, generator=random).to(dtype)

        images, count = len(rows_of_image), sum(rows_of_image)
        self.image_of_row = torch.arange(images).repeat_interleave(torch.tensor(rows_of_image))
        self.task = noise(count, 3, heads, width).unbind(1)
        self.image = noise(images, tokens, 2, heads, width).permute(2, 0, 3, 1, 4).unbind()
        self.tasks = torch.randint(tasks, (count,), generator=random)
        self.memory = self.lineage = None
        if memory:
            bias = torch.zeros(tasks, 1, memory, dtype=dtype)
            bias[0, :, 1:] = -torch.inf  # the first task has one memory token
            bias = bias if tasks > 1 else None
            self.memory = (*noise(2, tasks, heads, memory, width).unbind(), bias)
        if members > 1:
            itself = torch.arange(count)[:, None]
            lines = torch.randint(count, (count, members), generator=random)
            same_image = self.image_of_row[lines] == self.image_of_row[itself]
            same_image[:, 0] = False
            bias = torch.where(same_image, 0.0, -torch.inf).to(dtype)
            bias[:, 0] = 0
            self.lineage = torch.where(same_image, lines, itself), bias[:, None]
        self.starts = torch.tensor([0, *np.cumsum(rows_of_image)])
        self.widest = max(rows_of_image)

    def attend(self):
        actual = torch.full_like(self.task[0], torch.nan).contiguous()
        arguments = (actual, self.task, self.image, self.memory, self.lineage)
        attend_ragged(*arguments, starts=self.starts, widest=self.widest, tasks=self.tasks)
        return actual

    def expected(self, row):
        """(H, d), in float32: one softmax over all keys of a row, side by side."""
        queries, keys, values = (part.float() for part in self.task)
        image, task = self.image_of_row[row], self.tasks[row]
        lines = torch.tensor([row]) if self.lineage is None else self.lineage[0][row]
        bias = torch.zeros(len(lines))
        if self.lineage is not None:
            bias = self.lineage[1][row, 0].float()
        seen_keys = [self.image[0][image].float(), keys[lines].transpose(0, 1)]
        seen_values = [self.image[1][image].float(), values[lines].transpose(0, 1)]
        biases = [torch.zeros(seen_keys[0].shape[1]), bias]
        if self.memory is not None:
            memory_keys, memory_values, memory_bias = self.memory
            seen_keys.append(memory_keys[task].float())
            seen_values.append(memory_values[task].float())
            none = torch.zeros(memory_keys.shape[2])
            biases.append(none if memory_bias is None else memory_bias[task, 0].float())
        scores = torch.cat(seen_keys, dim=1) @ queries[row][..., None]  # (H, keys, 1)
        scores = scores[..., 0] * queries.shape[-1] ** -0.5 + torch.cat(biases)
        return (scores.softmax(dim=-1)[:, None] @ torch.cat(seen_values, dim=1))[:, 0]


@settings(max_examples=25)
@given(shape=ragged())
def test_every_row_takes_what_one_softmax_over_its_keys_gives(shape):
    rows = Rows(**shape)
    actual = rows.attend()
    expected = torch.stack([rows.expected(row) for row in range(len(actual))])
    tolerance = TOLERANCES[shape["dtype"]]
    torch.testing.assert_close(actual.float(), expected, atol=tolerance, rtol=0)


def test_what_is_not_a_number_stays_with_the_rows_of_its_image():
    shape = {"heads": 1, "width": 16, "tokens": 5, "tasks": 2, "memory": 2, "members": 1}
    rows = Rows([2, 1, 2], **shape, dtype=torch.float32, seed=0)
    alone = rows.attend()
    rows.image[0][1] = torch.nan
    rows.image[1][1] = torch.inf
    with np.errstate(invalid="ignore"):  # the interpreter computes in numpy
        actual = rows.attend()
    others = rows.image_of_row != 1
    assert not actual[~others].isfinite().any()
    assert torch.equal(actual[others], alone[others])


def test_a_pass_by_the_kernel_equals_the_plain_form_and_the_reference(
    hugging_face, backbone_of, kernel_everywhere, monkeypatch
):
    family = "dinov3"  # rotated keys have another layout than values
    model = hugging_face(family)
    pixels = image_batch(model, 3)
    tasks = some_tasks(model, 4)
    tasks["child"] = random_task(model, 9, parents=("task-1",), targets=["query", "up"])
    fast = add_all(MultiTaskViT(backbone_of(family)), tasks)
    images = [pixels[0], fast.encode(pixels)[1], pixels[2]]
    requested = [["child", "task-0"], ["task-2", "task-0", "child"], ["task-3"]]
    got = fast.predict_pairs(images, requested)
    assert kernel_everywhere
    monkeypatch.undo()
    for one, plain in zip(got, fast.predict_pairs(images, requested), strict=True):
        assert_same(one, plain, 1e-5)
    with torch.no_grad():
        dense = dense_forward(model, pixels, tasks)
    for number, one in enumerate(got):
        assert_same(one, {name: dense[name][number] for name in requested[number]}, 1e-4)


def test_the_kernel_is_for_gpus_and_for_passes_without_gradients(monkeypatch):
    found = object()
    monkeypatch.setattr(dispatch, "compile_kernel", lambda device, dtype, width: found)
    like = torch.zeros(1, 1, 16)
    on_gpu = type("Rows", (), {"device": torch.device("cuda"), "dtype": None, "shape": (1, 1, 16)})
    with torch.no_grad():
        assert dispatch.ragged_attention(like) is None
        assert dispatch.ragged_attention(on_gpu()) is found
    assert dispatch.ragged_attention(on_gpu()) is None


def test_where_the_kernel_cannot_run_the_log_says_so_and_the_plain_form_answers(caplog):
    """As on a machine without a C compiler; here for want of a GPU."""
    assert dispatch.compile_kernel.__wrapped__(torch.device("cuda"), torch.bfloat16, 64) is None
    assert "Triton kernel for task rows is not available" in caplog.text


def test_the_trial_runs_every_form_of_the_kernel():
    try_kernel(torch.device("cpu"), torch.float32, 16)


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engram_server.model.kernels.ragged_attention import _attend

signature, constants = {}, {"WIDTH": 64, "BLOCK_WIDTH": 64, "BLOCK_ROWS": 16, "BLOCK_TOKENS": 32}
for place, name in enumerate(_attend.arg_names):
    if name in constants:
        signature[name] = "constexpr"
    elif name in ("starts", "tasks", "lineage"):
        signature[name] = "*i64"
    elif place < _attend.arg_names.index("scale"):
        signature[name] = "*bf16"
    else:
        signature[name] = "fp32" if name == "scale" else "i32"
source = ASTSource(fn=_attend, signature=signature, constexprs=constants)
compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32))
assert "mma.sync" in compiled.asm["ptx"], "no tensor cores"
assert compiled.asm["cubin"]
"""


@pytest.mark.long
@pytest.mark.slow
def test_the_kernel_compiles_for_a_gpu_and_uses_its_tensor_cores(tmp_path):
    """The interpreter takes what the compiler refuses. Compiling needs no GPU."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", COMPILED], env=environment, check=True, timeout=120)
