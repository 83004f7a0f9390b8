"""The interpreter itself, with programs written by hand: results by the definitions of the instructions, and errors."""

import re

import numpy as np
import pytest
import torch

from tests.compiled import arithmetic, transfers
from tests.compiled.machine import Machine
from tests.compiled.memory import MemoryFault, Tensors
from tests.compiled.ptx import Unsupported, parse

DECODERS = {**arithmetic.DECODERS, **transfers.DECODERS}
HEAD = """
.version 8.0
.extern .shared .align 16 .b8 smem[];
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0,
    .param .u64 .ptr .global .align 1 kernel_param_1
)
.reqntid 32
{
    .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<40>; .reg .b64 %rd<20>;
    ld.param.b64 %rd1, [kernel_param_0];
    ld.param.b64 %rd2, [kernel_param_1];
    mov.u32 %r1, %tid.x;
"""


def run(body: str, given: torch.Tensor, result: torch.Tensor, shared: int = 4096) -> Tensors:
    """One warp; `given` is at %rd1, `result` at %rd2, the thread's number in %r1."""
    text = HEAD + body + "\n    ret;\n}\n"
    return Machine(parse(text), shared, DECODERS).run((1,), [("given", given), ("result", result)])


OWN = "mul.wide.u32 %rd3, %r1, 4; add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;"
"""Addresses of the thread's own 4 bytes of both tensors."""


def computed(instructions: str, value: int | float) -> torch.Tensor:
    """(2,) int32, the bits of %rd6, after instructions on %r2, which holds the value (int32 or float32)."""
    given = torch.full((32,), value, dtype=torch.int32 if isinstance(value, int) else torch.float32)
    result = torch.zeros(64, dtype=torch.int32)
    body = f"{OWN} ld.global.b32 %r2, [%rd4]; {instructions} shl.b64 %rd3, %rd3, 1; add.s64 %rd5, %rd2, %rd3;"
    run(body + "st.global.b64 [%rd5], %rd6;", given, result)
    assert (result.view(32, 2) == result[:2]).all()
    return result[:2]


@pytest.mark.parametrize(
    ("instructions", "value", "expected"),
    [
        ("div.s32 %r3, %r2, 2;", -7, -3),
        ("rem.s32 %r3, %r2, 2;", -7, -1),
        ("div.u32 %r3, %r2, 2;", -2, 0x7FFFFFFF),
        ("shr.s32 %r3, %r2, 40;", -7, -1),
        ("shr.u32 %r3, %r2, 32;", -7, 0),
        ("shl.b32 %r3, %r2, 33;", 1, 0),
        ("mul.hi.s32 %r3, %r2, 1000;", -(1 << 30), -250),
        ("cvt.u16.u32 %rs1, %r2; mul.hi.u16 %rs2, %rs1, -21845; cvt.u32.u16 %r3, %rs2;", 700, 700 * 43691 >> 16),
        ("cvt.s64.s32 %rd7, %r2; mul.hi.s64 %rd8, %rd7, 0x7fffffffffffffff; cvt.u32.u64 %r3, %rd8;", -6, -3),
        ("mad.lo.s32 %r3, %r2, 5, 3;", -4, -17),
        ("bfe.s32 %r3, %r2, 4, 4;", 0xF5, -1),
        ("bfe.u32 %r3, %r2, 4, 4;", 0xF5, 15),
        ("popc.b32 %r3, %r2;", -16, 28),
        ("cvt.s64.s32 %rd7, %r2; popc.b64 %r3, %rd7;", -16, 60),
        ("prmt.b32 %r3, %r2, 0, 0x8801;", 0x80FF, -128),  # bytes 1 and 0, twice the sign of byte 0
        ("lop3.b32 %r3, %r2, 12, 10, 0x96;", 9, 9 ^ 12 ^ 10),
        ("lop3.b32 %r3, %r2, 12, 10, 0xCA;", 9, 9 & 12 | ~9 & 10),
        ("shf.l.wrap.b32 %r3, %r2, 5, 4;", -1, 5 << 4 | 15),
        ("cvt.rzi.s32.f32 %r3, %r2;", -2.7, -2),
        ("cvt.rni.s32.f32 %r3, %r2;", 2.5, 2),
        ("setp.ne.f32 %p1, %r2, 0f3F800000; selp.b32 %r3, 1, 2, %p1;", float("nan"), 2),
        ("setp.neu.f32 %p1, %r2, 0f3F800000; selp.b32 %r3, 1, 2, %p1;", float("nan"), 1),
        ("max.f32 %r4, %r2, 0f40000000; cvt.rzi.s32.f32 %r3, %r4;", float("nan"), 2),
        ("setp.gt.s32 %p1, %r2, 3; mov.b32 %r3, 7; @!%p1 mov.b32 %r3, 8;", 3, 8),
    ],
)
def test_a_result(instructions: str, value: int | float, expected: int) -> None:
    assert int(computed(instructions + "cvt.s64.s32 %rd6, %r3;", value)[0]) == expected


def test_fma_rounds_once() -> None:
    value = 1 + 2.0**-23
    bits = computed("fma.rn.f32 %r3, %r2, %r2, 0fBF800002; cvt.u64.u32 %rd6, %r3;", value)[:1]
    # (1 + e)(1 + e) - (1 + 2 e) = e e, which two roundings lose.
    assert float(bits.view(torch.float32)) == 2.0**-46


@pytest.mark.parametrize("seed", range(4))
def test_bfloat16_is_rounded_as_torch_does(seed: int) -> None:
    given = torch.randn(32, generator=torch.Generator().manual_seed(seed)) * 10.0**seed
    given[:3] = torch.tensor([float("inf"), 1 + 2.0**-8, 1 + 3 * 2.0**-8])
    result = torch.zeros(64, dtype=torch.bfloat16)
    run(
        f"{OWN} ld.global.b32 %r2, [%rd4]; cvt.rn.bf16x2.f32 %r3, 0f3F800000, %r2; st.global.b32 [%rd5], %r3;",
        given,
        result,
    )
    assert torch.equal(result[::2], given.bfloat16()) and (result[1::2] == 1).all()


def test_a_warps_matrix_product() -> None:
    """Registers as PTX defines them: a thread of group g = lane / 4 and place t = lane % 4."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(16, 16, generator=generator).bfloat16(), torch.randn(16, 8, generator=generator).bfloat16()
    c = torch.randn(16, 8, generator=generator)
    lanes = []
    for lane in range(32):
        g, t = divmod(lane, 4)
        rows, columns = (g, g + 8, g, g + 8), (2 * t, 2 * t, 2 * t + 8, 2 * t + 8)
        halves = [a[row, column + k] for row, column in zip(rows, columns, strict=True) for k in (0, 1)]
        halves += [b[2 * t + k + 8 * i, g] for i in (0, 1) for k in (0, 1)]
        sums = torch.stack([c[g, 2 * t], c[g, 2 * t + 1], c[g + 8, 2 * t], c[g + 8, 2 * t + 1]])
        lanes.append(torch.cat([torch.stack(halves).view(torch.int32), sums.view(torch.int32)]))
    result = torch.zeros(32, 4)
    body = "mul.wide.u32 %rd3, %r1, 40; add.s64 %rd4, %rd1, %rd3; mul.wide.u32 %rd3, %r1, 16; add.s64 %rd5, %rd2, %rd3;"
    body += "".join(f"ld.global.b32 %r{10 + i}, [%rd4+{4 * i}];" for i in range(10))
    body += "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r20, %r21, %r22, %r23}, {%r10, %r11, %r12, %r13}, "
    body += "{%r14, %r15}, {%r16, %r17, %r18, %r19}; st.global.v4.b32 [%rd5], {%r20, %r21, %r22, %r23};"
    run(body, torch.stack(lanes), result)
    wanted = a.float() @ b.float() + c
    found = result.view(8, 4, 2, 2).transpose(1, 2).transpose(0, 1).reshape(16, 8)
    assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("turned", ["", ".trans"])
def test_a_tile_of_shared_memory(turned: str) -> None:
    given, result = torch.arange(64, dtype=torch.int16).view(8, 8), torch.zeros(64, dtype=torch.int16)
    body = f"""{OWN} ld.global.b32 %r2, [%rd4]; shl.b32 %r3, %r1, 2; mov.b32 %r4, smem; add.s32 %r5, %r4, %r3;
    st.shared.b32 [%r5], %r2; and.b32 %r6, %r1, 7; shl.b32 %r6, %r6, 4;
    ldmatrix.sync.aligned.m8n8.x1{turned}.shared.b16 {{%r7}}, [%r6]; st.global.b32 [%rd5], %r7;"""
    run(body, given, result)
    assert torch.equal(result.view(8, 8), given.T if turned else given)


@pytest.mark.parametrize("group", [0, 1])
def test_a_copy_lands_when_it_is_waited_for(group: int) -> None:
    given, result = torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    body = f"""{OWN} shl.b32 %r3, %r1, 2; st.shared.b32 [%r3], %r1;
    cp.async.ca.shared.global [%r3], [%rd4], 4; cp.async.commit_group; cp.async.wait_group {group};
    bar.sync 0; ld.shared.b32 %r4, [%r3]; st.global.b32 [%rd5], %r4;"""
    run(body, given, result)
    assert torch.equal(result, given if group == 0 else torch.full_like(given, -1))


@pytest.mark.parametrize("taken", [16, 0])
def test_a_copy_fills_with_zeros_what_it_leaves_out(taken: int) -> None:
    given, result = torch.ones(128, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    body = f"""{OWN} shl.b32 %r3, %r1, 4; cvt.u64.u32 %rd6, %r3; add.s64 %rd6, %rd1, %rd6; mov.b32 %r5, {taken};
    cp.async.cg.shared.global [%r3], [%rd6], 16, %r5; cp.async.commit_group; cp.async.wait_group 0;
    ld.shared.b32 %r4, [%r3]; st.global.b32 [%rd5], %r4;"""
    run(body, given, result)
    assert (result == (taken > 0)).all()


@pytest.mark.parametrize(
    ("access", "message"),
    [
        ("ld.global.b32 %r2, [%rd4+4];", "load of 4 bytes at byte 128 of 'given', which has 128"),
        ("ld.global.b32 %r2, [%rd4+-4];", "load of 4 bytes at byte -4 of 'given', which has 128"),
        ("st.global.b32 [%rd5+4096], %r1;", "store of 4 bytes at byte 4096 of 'result', which has 128"),
        ("ld.global.v2.b32 {%r2, %r3}, [%rd1+4];", "misaligned load of 8 bytes of 'given'"),
        ("mov.b64 %rd6, 64; ld.global.b32 %r2, [%rd6];", "computed from no tensor's"),
        ("ld.shared.b32 %r2, [%r1+4096];", "of 4096 bytes of shared memory"),
        ("ld.shared.b32 %r2, [%r1];", "misaligned load of 4 bytes of shared memory"),
    ],
)
def test_an_access_that_is_wrong(access: str, message: str) -> None:
    # Both lie in one storage, where an access beyond one is an access to the other.
    given, result = torch.zeros(3, 32, dtype=torch.int32)[:2]
    with pytest.raises(MemoryFault, match=re.escape(message)):
        run(OWN + access, given, result)


@pytest.mark.parametrize(
    "body",
    [
        "setp.eq.s32 %p1, %r1, 3; @%p1 bra $L1; mov.b32 %r2, 1; $L1: mov.b32 %r3, 2;",
        "atom.global.add.u32 %r2, [%rd1], 1;",
        "add.sat.f32 %r2, %r1, %r1;",
        "cvt.rn.satfinite.e4m3x2.f32 %rs1, %r1, %r1;",
    ],
)
def test_what_is_not_known_is_an_error(body: str) -> None:
    with pytest.raises(Unsupported):
        run(body, torch.zeros(1), torch.zeros(1))


def test_blocks_that_go_several_ways_end_as_each_would_alone() -> None:
    """Block i goes round i times."""
    text = HEAD + (
        "mov.u32 %r2, %ctaid.x; mov.b32 %r3, 0; $L0: setp.ge.s32 %p1, %r3, %r2; @%p1 bra $L1;\n"
        "add.s32 %r3, %r3, 1; bra.uni $L0;\n$L1: mul.wide.u32 %rd3, %r2, 4; add.s64 %rd3, %rd2, %rd3;\n"
        "mul.lo.s32 %r4, %r3, 3; st.global.b32 [%rd3], %r4; ret;\n}\n"
    )
    program = parse(text)
    assert len(program.loops) == 1 and [i.operation for i in program.loops[0]] == ["setp", "bra", "add", "bra"]
    result = torch.zeros(9, dtype=torch.int32)
    memory = Machine(program, 0, DECODERS).run((9,), [("given", torch.zeros(1)), ("result", result)])
    assert result.tolist() == [3 * i for i in range(9)]
    assert memory.written == {("result", 4): 9 * 32 * 4}


def test_what_was_never_written_is_nan() -> None:
    result = torch.zeros(32)
    run(f"{OWN} st.global.b32 [%rd5], %r9;", torch.zeros(32), result)
    assert np.isnan(result.numpy()).all()
