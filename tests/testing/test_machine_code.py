"""machine_code: the loops that hold matrix products are found, and what is spilled in them is counted."""

import pytest

pytest.importorskip("triton")

from ringflash.testing.machine_code import Loop, product_loops

# A partition that is reached by a table: a loop of tiles holds a product, a loop of keys with another, and a wait that
# the compiler has moved behind the end.
KERNEL = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   BRX R2 -0x20 ;
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2 ;
        /*0030*/              @!P0 BRA 0x20 ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ ;
        /*0050*/                   STL [R1], R3 ;
        /*0060*/              @!P0 BRA 0xe0 ;
        /*0070*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0080*/                   {spill}
        /*0090*/              @!P1 BRA P2, 0x60 ;
        /*00a0*/                   LDL R3, [R1] ;
        /*00b0*/               @P3 BRA 0x40 ;
        /*00c0*/                   EXIT ;
        /*00d0*/                   BRA 0xd0;
        /*00e0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2 ;
        /*00f0*/              @!P0 BRA 0xe0 ;
        /*0100*/                   BRA 0x70 ;
        """
ANOTHER_WAIT = """
        /*0110*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2 ;
        /*0120*/              @!P0 BRA 0x110 ;
        /*0130*/                   BRA 0x60 ;
        """


@pytest.mark.parametrize(
    ("spill", "count"), [("FADD R1, R2, R3 ;", 0), ("LDL.64 R4, [R1+0x8] ;", 1), ("@P0 STL [R1+0x8], R4 ;", 1)]
)
def test_the_innermost_loop_is_told_from_the_loop_around_it(spill, count):
    # Four instructions of the loop itself and three of the wait that it goes through.
    assert product_loops(KERNEL.format(spill=spill)) == [Loop(7, count)]


def test_without_an_inner_loop_the_outer_one_counts():
    straight = KERNEL.format(spill="FADD R1, R2, R3 ;").replace("@!P1 BRA P2, 0x60", "FADD R4, R2, R3")
    assert product_loops(straight) == [Loop(11, 2)]


def test_a_product_between_waits_is_in_no_loop():
    code = (
        KERNEL.format(spill="FADD R1, R2, R3 ;")
        .replace("@P3 BRA 0x40", "NOP")
        .replace("STL [R1], R3", "@!P0 BRA 0x110")
    )
    assert product_loops(code + ANOTHER_WAIT) == [Loop(7, 0)]


def test_code_without_products_has_no_such_loop():
    assert product_loops(KERNEL.format(spill="NOP ;").replace("HGMMA", "IMAD")) == []
